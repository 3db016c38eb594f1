"""Explanation of failed downloads: what is wrong, what was expected and what to do."""

import errno

from huggingface_hub import constants, errors, get_token

from engine.errors import HubError
from settings.hub_model import HubModel


def explained(error: Exception, model: HubModel) -> HubError:
    """Return the error to show for one that `huggingface_hub` raised for this model."""
    return HubError(_explanation(error, model))


def _explanation(error: Exception, model: HubModel) -> str:
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if isinstance(error, errors.GatedRepoError):
        request = f"accept its conditions at {hub}/{model.id}"
        if get_token() is None:
            return f"{model} is gated and needs a token: {request}, and set HF_TOKEN to a token of that account"
        return f"{model} is gated, and the account of the given token has no access: {request} with that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        local = f"and there is no folder {model}"
        if get_token() is None:
            return (
                f"{hub} has no public model {model.id}, {local}: check the spelling, or set HF_TOKEN if the model is "
                "private"
            )
        return (
            f"{hub} has no model {model.id} that the account of the given token may read, {local}: check the spelling "
            "and the token's permissions"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{model.id} has no revision {model.revision!r} on {hub}: give one of its branches, tags or commits, as "
            "ORG/NAME@REVISION"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.is_offline_mode():
            return (
                f"{model} is not complete in the cache {cache}, and HF_HUB_OFFLINE forbids downloads: run once without "
                "it, or set HF_HOME to the folder of another cache"
            )
        cause = error.__cause__ or error
        if isinstance(cause, errors.HfHubHTTPError):
            return _explanation(cause, model)
        return (
            f"{hub} cannot be reached ({cause}), and {model} is not complete in the cache {cache}: check the network "
            "and the proxy, set HF_ENDPOINT to a mirror, or give a local folder"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status == 401:
            return f"{hub} rejects the given token: set HF_TOKEN to a valid one, or unset it for a public model"
        if status == 403:
            return f"{hub} refuses {model} to the given token: give its account or the token the right to read it"
        return f"{hub} cannot serve {model} ({error}): try again later"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the cache {cache} is full: free some space, or set HF_HOME to a folder of a larger disk"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"the cache {cache} cannot be written ({error}): change its owner, or set HF_HOME to a writable folder"
    return (
        f"the download of {model} from {hub} failed ({type(error).__name__}: {error}): run the command again; complete "
        "files are kept"
    )
