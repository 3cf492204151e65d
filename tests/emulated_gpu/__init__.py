"""An emulated GPU: the product's CUDA branches run on a machine without one, unchanged and in all processes of a run.

Device memory is host memory, every kernel is computed by the CPU's, and NCCL's collectives by gloo. Copies and events
take effect late, in an order drawn from a seed. A run on it shows that code paths run, wait for what they read, and
give the values that the CPU gives. It shows nothing about NVIDIA's kernels, NCCL, speed or the need of memory.

    make setup-emulated-gpu                                 the environment .venv-emulated/ (5.7 GB; needs gcc)
    make test-emulated-gpu                                  SEEDS=3; LONG=1 adds the runs that take long
    .venv-emulated/bin/python -m tests.emulated_gpu [--gpus 3] [--seed 1] COMMAND...

runtime/        stand-ins for the CUDA runtime, driver, management library and libnccl, in C
machine.py      the environment variables of a machine with emulated GPUs
hook.py         replaces kernels as soon as a process has imported torch
kernels.py      the CPU's kernels at torch's dispatch key for CUDA; special.py has those that the CPU lacks
collectives.py  torch's process group for NCCL, over gloo
"""
