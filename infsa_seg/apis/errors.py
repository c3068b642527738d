# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Errors as one line for people."""


def one_line(error: Exception) -> str:
    """The line of an error that says what is wrong with what.

    Args:
        error (Exception): Anything; one from the operating system is led by
            its file, of one from a data worker the last line is taken.
    """
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f'{error.filename}: {error.strerror}'
    # The text of a KeyError would be quoted.
    text = str(*error.args[:1]) if isinstance(error, KeyError) else str(error)
    lines = text.strip().splitlines() or [type(error).__name__]
    return lines[-1] if lines[0].startswith('Caught ') else lines[0]
