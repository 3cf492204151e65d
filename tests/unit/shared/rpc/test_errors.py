"""Which errors end a run at once: only those that the same input is certain to raise again."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from proto.messages import ErrorCode
from shared.rpc.errors import BadInput, DeadlineExceeded, RpcError, is_certain


def caused_by(*causes: BaseException) -> BaseException:
    """Return a BadInput raised while `causes` were handled, the last of them being the first error."""

    def fail(left: tuple[BaseException, ...]) -> None:
        if not left:
            return
        try:
            fail(left[1:])
        except BaseException:
            raise left[0] from None
        raise left[0]

    try:
        fail((BadInput("model m: cannot be loaded"), *causes))
    except BadInput as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "causes",
    [
        (),
        (ValueError("model type 'x' is not known"),),
        (OSError("config.json is not a valid JSON file"), KeyError("a")),
        (FileNotFoundError(errno.ENOENT, "no such file", "config.json"),),
    ],
)
def test_a_bad_input_is_certain_to_fail_again(causes: tuple[BaseException, ...]) -> None:
    assert is_certain(caused_by(*causes))


@pytest.mark.parametrize(
    "cause",
    [
        MemoryError(),
        TimeoutError(),
        ConnectionResetError(),
        RuntimeError("CUDA out of memory"),
        Exception("Error while deserializing: I/O error: Stale file handle (os error 116)"),
        *(OSError(number, "text") for number in (errno.EIO, errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ESTALE)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("hide", [lambda cause: (cause,), lambda cause: (OSError("cannot load"), ValueError(), cause)])
def test_what_may_pass_is_not_certain_however_deeply_a_library_hides_it(
    cause: BaseException, hide: Callable[[BaseException], tuple[BaseException, ...]]
) -> None:
    assert not is_certain(caused_by(*hide(cause)))


def test_the_answer_of_a_peer_is_not_certain() -> None:
    for error in (RpcError(ErrorCode.BAD_REQUEST, "no"), DeadlineExceeded("late"), ValueError("no")):
        assert not is_certain(error)
