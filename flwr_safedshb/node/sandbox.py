"""Confine a worker, which runs the code of an app, by Linux's Landlock.

With ``sandbox = true`` in a node's file a worker reaches what it needs and no more:

- it reads Python, the system's libraries, and the paths that the node's config names;
- it writes its own temporary folder and ``state-dir``, with ledger and momentum;
- from Linux 6.7 on it connects by TCP to its SuperNode only, and listens nowhere;
- from Linux 6.12 on it sends no signals to other processes.

So it reaches neither the node's key and file nor the user's other files, and does not
trace the node's processes. It can still write the ledger, which it charges, and release
the examples in its reply: code is approved (`approvals`), and confined besides.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import flwr_safedshb

SANDBOX, STATE_DIR = "sandbox", "state-dir"
# What programs read of the system beside its libraries; not /etc, where keys may be.
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin", "/sys/devices/system"),
    # Not /proc: it shows the environment of the user's other processes.
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group"),
    *("/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/ssl/certs"),
)
_WRITABLE = ("/dev/null",)

# Linux's numbers: the same on all architectures that Landlock has.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_NO_NEW_PRIVILEGES = 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_SCOPE_ALL = 0b11  # abstract sockets and signals
# How many kinds of access to files a version of Landlock knows.
_KINDS = {1: 13, 2: 14, 3: 15, 4: 15}
_MOST_KINDS = 16
_NETWORK_VERSION, _SCOPE_VERSION = 4, 6


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _PortRule(ctypes.Structure):
    _fields_ = (("access", ctypes.c_uint64), ("port", ctypes.c_uint64))


def find_landlock() -> int:
    """Return the version of Landlock that the system has; 0 for none."""
    if sys.platform != "linux":
        return 0
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    except OSError:
        return 0


def check_sandbox(config: Mapping[str, object], secrets: Iterable[Path]) -> None:
    """Check that a node's workers can be confined, away from its secrets.

    Raises
    ------
    ValueError
    """
    wanted = config.get(SANDBOX, False)
    if not isinstance(wanted, bool):
        raise ValueError(f"{SANDBOX}={wanted!r} must be true or false")
    if not wanted:
        return
    if not find_landlock():
        raise ValueError(
            f"{SANDBOX}=true needs Landlock, which Linux has from 5.13 on where it is "
            "enabled; set it to false, and run the node in a container of its own"
        )
    places = [Path(os.path.realpath(place)) for place in find_readable(config)]
    for secret in secrets:
        real = Path(os.path.realpath(secret))
        for place in places:
            if real.is_relative_to(place):
                raise ValueError(
                    f"{secret} lies in {place}, which workers read under "
                    f"{SANDBOX}=true; move it elsewhere"
                )


def find_readable(config: Mapping[str, object]) -> list[str]:
    """Return what a worker may read: system, Python, and paths in the config."""
    packages = [entry for entry in sys.path if os.path.isdir(entry)]
    named = [str(value) for value in config.values() if isinstance(value, str)]
    return [
        *_SYSTEM,
        *(sys.prefix, sys.base_prefix, str(Path(flwr_safedshb.__file__).parent)),
        *packages,
        *(value for value in named if os.sep in value),
    ]


def confine(config: Mapping[str, object], home: str, port: int) -> None:
    """Confine this process, which must have one thread only, for the rest of its life.

    Parameters
    ----------
    config : mapping
        The node's; with its ``state-dir`` and the paths of its data.
    home : str
        The process's own folder.
    port : int
        Of its SuperNode, on the loopback.

    Raises
    ------
    OSError
        If it cannot be confined.
    """
    version = find_landlock()
    every = (1 << _KINDS.get(version, _MOST_KINDS)) - 1
    read = _EXECUTE | _READ_FILE | _READ_DIR
    network = _BIND_TCP | _CONNECT_TCP if version >= _NETWORK_VERSION else 0
    ruleset = _Ruleset(every, network, _SCOPE_ALL * (version >= _SCOPE_VERSION))
    handle = _call(
        _CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset))
    )
    try:
        for place in find_readable(config):
            _allow(handle, place, read & every)
        writable = [home, *_WRITABLE]
        if STATE_DIR in config:
            Path(str(config[STATE_DIR])).mkdir(0o700, parents=True, exist_ok=True)
            writable.append(str(config[STATE_DIR]))
        for place in writable:
            _allow(handle, place, every & ~_EXECUTE)
        if network:
            rule = _PortRule(_CONNECT_TCP, port)
            _call(_ADD_RULE, handle, _NET_PORT, ctypes.byref(rule))
        _check(ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _call(_RESTRICT_SELF, handle)
    finally:
        os.close(handle)


def _allow(ruleset: int, place: str, access: int) -> None:
    """Allow access beneath a path; one that is not there stays out of reach."""
    try:
        parent = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _PathRule(access if os.path.isdir(place) else access & _OF_FILES, parent)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule))
    finally:
        os.close(parent)


def _call(number: int, *arguments: object) -> int:
    """Make a system call with up to three arguments, the missing ones 0."""
    padded = [*arguments, *(0,) * (4 - len(arguments))]
    return _check(ctypes.CDLL(None, use_errno=True).syscall(number, *padded))


def _check(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
