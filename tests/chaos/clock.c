/* Moves the wall clock of every process that preloads this library by the number of seconds in the file CHAOS_CLOCK,
 * which the test changes while they run. The monotonic clock stays as it is, as when an operator sets the date. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef int (*reader)(clockid_t, struct timespec *);
static const volatile long *jump_s;
static reader next_reader;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *found = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        jump_s = found == MAP_FAILED ? NULL : found;
        close(file);
    }
    next_reader = (reader)dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t id, struct timespec *to) {
    int status = next_reader ? next_reader(id, to) : (int)syscall(SYS_clock_gettime, id, to);
    if (status == 0 && jump_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) to->tv_sec += *jump_s;
    return status;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
