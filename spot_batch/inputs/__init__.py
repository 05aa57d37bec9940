"""Prompts in: pin the input, read rows of it, render prompts, address samples.

Pure pyarrow and the standard library; the tokenizer is handed in. `datasets` is loaded for hub
datasets only.
"""

from spot_batch.inputs.errors import InputError, RowFault
from spot_batch.inputs.ids import audit_sample_ids, noise_key
from spot_batch.inputs.pin import check_unchanged, pin_input, recognised
from spot_batch.inputs.prepare import PreparedSample, RowReader, SamplePreparer
from spot_batch.inputs.reader import InputReader, InputRows
from spot_batch.inputs.render import PromptRenderer, RenderedPrompt
from spot_batch.inputs.template import with_template

__all__ = [
    "InputError",
    "InputReader",
    "InputRows",
    "PreparedSample",
    "PromptRenderer",
    "RenderedPrompt",
    "RowFault",
    "RowReader",
    "SamplePreparer",
    "audit_sample_ids",
    "check_unchanged",
    "noise_key",
    "pin_input",
    "recognised",
    "with_template",
]
