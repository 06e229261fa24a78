"""Reads the event files of a run with a reader of its own and compares them with its log.jsonl.

    tensorboard_check.py DIR LOG      checks every checksum, then each step's numbers: once, and equal to the log's
"""

import json
import pathlib
import struct
import sys


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    data = path.read_bytes()
    while data:
        (length, length_crc) = struct.unpack("<QI", data[:12])
        assert length_crc == masked(data[:8]), path
        record, (crc,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert crc == masked(record), path
        data = data[16 + length :]
        yield record


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def fields(data):
    """(number, value) of a protobuf message: int, float or bytes by the wire's type."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 2:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
        else:
            form, size = {1: ("<d", 8), 5: ("<f", 4)}[key & 7]
            (value,), at = struct.unpack(form, data[at : at + size]), at + size
        yield key >> 3, value


def read(folder):
    """{tag: [(step, value)]}, without steps that a later START invalidates."""
    curves = {}
    for path in sorted(pathlib.Path(folder).iterdir()):
        for n, record in enumerate(records(path)):
            event = dict(fields(record))
            assert event[1] > 1.6e9, "a time of day"
            assert (n == 0) == (event.get(3) == b"brain.Event:2"), "the first record, and no other, says the version"
            step = event.get(2, 0)
            if 7 in event:
                assert dict(fields(event[7])) == {1: 1}
                curves = {tag: [p for p in points if p[0] < step] for tag, points in curves.items()}
            for _, value in fields(event.get(5, b"")):
                value = dict(fields(value))
                curves.setdefault(value[1].decode(), []).append((step, value[2]))
    return curves


def logged(path, kind, key):
    rows = [json.loads(line) for line in open(path)]
    return [(row["step"], row[key]) for row in rows if row["kind"] == kind]


def check(curves, log):
    for tag, kind, key in [("train/loss", "step", "loss"), ("train/lr", "step", "lr"), ("train/grad_norm", "step", "grad_norm"),
                           ("machine/tokens_per_s", "step", "tokens_per_s"), ("validation/loss", "valid", "loss")]:
        expected = logged(log, kind, key)
        assert expected and [s for s, _ in curves[tag]] == [s for s, _ in expected], (tag, curves[tag], expected)
        for (_, got), (step, value) in zip(curves[tag], expected):
            assert abs(got - value) <= 1e-6 * abs(value), (tag, step, got, value)


if __name__ == "__main__":
    check(read(sys.argv[1]), sys.argv[2])
