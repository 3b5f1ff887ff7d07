"""The errors a user can cause.

Each says what was asked, what was found and what to do, in one line; the launcher prints that line and
exits with `exit_code`. A mistake of our own is an `assert`, never one of these.
"""


class NtpError(Exception):
    """Base of every error that a user's input or environment can cause."""

    exit_code = 2


class ConfigError(NtpError):
    """The configuration names an unknown key, a wrong type or an impossible combination."""


class TopologyError(NtpError):
    """A failed coordinate cannot be parsed, lies outside the mesh or is given twice."""


class PlanError(NtpError):
    """No plan satisfies the configuration with the ranks that are left."""


class DataError(NtpError):
    """A data source or tokenizer is missing, empty, too short or does not fit the model."""


class CheckpointError(NtpError):
    """A checkpoint is missing, damaged, cannot be written or belongs to another model."""


class HuggingFaceError(NtpError):
    """A Hugging Face folder is incomplete, of another shape or of an architecture that is not known here."""
