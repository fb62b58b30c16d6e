"""An accident: in step $SPOIL_AT an element of each rank's gradient, or after it of its weights, is no number any more."""

# pyright: basic, reportPrivateImportUsage=false
import math
import os

from torch import nn

from ddptrain import train

_step, _clip = train.Training._step, nn.utils.clip_grad_norm_
_at = [0]


def clip_grad_norm_(parameters, *args, **kwargs):
    parameters = list(parameters)
    if _at[0] == int(os.environ["SPOIL_AT"]) and os.environ["SPOIL_WHAT"] == "gradient":
        parameters[0].grad.view(-1)[0] = math.inf
    return _clip(parameters, *args, **kwargs)


def step(self, *args, **kwargs):
    _at[0] += 1
    done = _step(self, *args, **kwargs)
    if _at[0] == int(os.environ["SPOIL_AT"]) and os.environ["SPOIL_WHAT"] == "weights":
        next(self.core.parameters()).data.fill_(math.nan)
    return done


nn.utils.clip_grad_norm_ = clip_grad_norm_
train.Training._step = step
