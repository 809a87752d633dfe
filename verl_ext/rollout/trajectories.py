"""The row that one finished rollout becomes in TransferQueue: verl's own fields and tags, under verl's own keys."""

from __future__ import annotations

from typing import Any

import torch
from verl.experimental.agent_loop import AgentLoopOutput
from verl.protocol import DataProto
from verl.workers.rollout.utils import get_max_position_embeddings


def row_key(uid: str, session: int, index: int) -> str:
    """verl's key of a trajectory, `{uid}_{session}_{index}`; verl parses the uid up to the first underscore."""
    return f"{uid}_{session}_{index}"


def row_tag(
    prompt_len: int, response_len: int, global_steps: int, min_version: int, max_version: int
) -> dict[str, Any]:
    """verl's tag of a trajectory; the versions say which weights generated it."""
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": global_steps,
        "min_global_steps": min_version,
        "max_global_steps": max_version,
    }


def at_limit(worker: Any, output: AgentLoopOutput) -> bool:
    """Whether an output is as long as it may be: it has all tokens of a response, or of the engine's context.

    Args:
        worker: the agent-loop worker (knows the settings of the engine, and the model's context where they name none).
        output: the last output of a session.
    """
    rollout, tokens = worker.rollout_config, len(output.response_ids)
    context = rollout.max_model_len or get_max_position_embeddings(worker.model_config.hf_config)
    return tokens >= rollout.response_length or len(output.prompt_ids) + tokens >= context


def row_fields(worker: Any, output: AgentLoopOutput, prompt_fields: dict[str, Any]) -> dict[str, Any]:
    """The fields verl's own worker writes for one output (`AgentLoopWorkerTQ._agent_loop_postprocess`, verl 0.9.1).

    Args:
        worker: the agent-loop worker (knows multi-modal inputs and position ids).
        output: one output of a session.
        prompt_fields: the data set's fields of the prompt plus uid, session_id and global_steps.
    """
    fields = output.as_dict()
    input_ids = torch.cat([fields["prompts"], fields["responses"]])
    multi_modal_inputs = worker._compute_multi_modal_inputs(output, input_ids)
    fields.update(prompt_fields)
    fields.pop("multi_modal_data", None)
    fields["loss_mask"] = fields["response_mask"]
    fields["input_ids"] = input_ids
    fields["multi_modal_inputs"] = multi_modal_inputs
    if worker.processor is None:
        fields["position_ids"] = torch.arange(input_ids.size(0), dtype=torch.int64)
    else:
        mask = torch.ones_like(input_ids)
        fields["position_ids"] = worker._compute_position_ids(
            input_ids.unsqueeze(0), mask.unsqueeze(0), multi_modal_inputs
        ).squeeze(0)
    return fields


def reward_batch(outputs: list[AgentLoopOutput], prompt_fields: list[dict[str, Any]]) -> DataProto:
    """One batch for `RewardLoopWorker.compute_score_batch`: a row an output; prompts padded left, responses right.

    verl sends one rollout a call; the reward managers read the last `responses.shape[-1]` columns of the attention
    mask as the response's mask, which holds for rows of different lengths only with prompts padded on the left.
    """
    import numpy as np
    from tensordict import TensorDict

    n = len(outputs)
    p_width = max(len(output.prompt_ids) for output in outputs)
    r_width = max(1, max(len(output.response_ids) for output in outputs))
    prompts = torch.zeros(n, p_width, dtype=torch.int64)
    responses = torch.zeros(n, r_width, dtype=torch.int64)
    mask = torch.zeros(n, p_width + r_width, dtype=torch.int64)
    for i, output in enumerate(outputs):
        p, r = len(output.prompt_ids), len(output.response_ids)
        prompts[i, p_width - p :] = torch.tensor(output.prompt_ids, dtype=torch.int64)
        responses[i, :r] = torch.tensor(output.response_ids, dtype=torch.int64)
        mask[i, p_width - p : p_width + r] = 1
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": mask,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }

    def column(values: list[Any]) -> np.ndarray:
        array = np.empty(n, dtype=object)
        array[:] = values
        return array

    # A reward may write into extra_info (verl's naive manager does): rows of one group must not share the dictionary.
    names = prompt_fields[0].keys()
    columns = {
        name: column([dict(v) if isinstance(v := fields.get(name), dict) else v for fields in prompt_fields])
        for name in names
    }
    columns |= {
        "__num_turns__": np.array([output.num_turns for output in outputs]),
        "tool_extra_fields": column([output.extra_fields for output in outputs]),
        "prompt_len": np.array([len(output.prompt_ids) for output in outputs]),
        "response_len": np.array([len(output.response_ids) for output in outputs]),
    }
    return DataProto(batch=TensorDict(tensors, batch_size=n), non_tensor_batch=columns)
