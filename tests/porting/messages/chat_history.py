"""Conversations as a tensorclass: roles and contents, appended to, templated, stacked, stored."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorClass, lazy_stack, set_list_to_stack


class Message(TensorClass["nocast"]):
    role: str
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None
    is_complete: bool = True

    def __post_init__(self):
        if self.content is None:
            self.content = ""

    def render(self):
        if self.batch_size:
            return [message.render() for message in self.unbind(0)]
        return f"<{self.role}>{self.content}</{self.role}>"

    @classmethod
    def from_chats(cls, chats):
        if isinstance(chats[0], list):
            return lazy_stack([cls.from_chats(chat) for chat in chats])
        return lazy_stack([cls(role=c["role"], content=c["content"]) for c in chats])


class Tokens(TensorClass["nocast"]):
    prompt: torch.Tensor | None = None
    response: torch.Tensor | None = None
    full: torch.Tensor | None = None

    @property
    def length(self):
        return self.full.shape[-1]


class Turn(TensorClass["nocast"]):
    history: Message
    tokens: Tokens | None = None
    reward: torch.Tensor | None = None


def main():
    chat = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Capital of Peru?"},
        {"role": "assistant", "content": "Lima."},
    ]
    history = Message.from_chats(chat)
    print(type(history).__name__, history.batch_size, history.role, history.content)
    print(history[1].role, history[-1].content, history[1:].render())
    print([type(m).__name__ for m in history.unbind(0)], history[0].is_complete, history[0].tool_calls)

    longer = lazy_stack([*history.unbind(0), Message(role="user", content="And of Chile?")])
    print(longer.batch_size, longer[-1].render(), longer.role[-2:])
    empty = Message(role="assistant", content=None)
    print(repr(empty.content), empty.batch_size, empty.is_complete)

    call = Message(role="assistant", content="", tool_calls=[{"name": "search", "arguments": {"q": "Chile"}}])
    print(call.tool_calls, type(call.tool_calls).__name__)
    call.content = "searching"
    call.is_complete = False
    print(call.render(), call.is_complete)

    turns = []
    for n in (2, 4):
        tokens = Tokens(prompt=torch.arange(n), response=torch.arange(n, n + 3), full=torch.arange(n + 3))
        turns.append(Turn(history=history[: n - 1], tokens=tokens, reward=torch.tensor([float(n)])))
    print([turn.tokens.length for turn in turns], turns[0].history.shape)
    batch = lazy_stack(turns)
    print(type(batch).__name__, batch.batch_size, batch.reward.tolist())
    print([t.tokens.full.tolist() for t in batch.unbind(0)], batch[1].tokens.response.tolist())
    print(type(batch[0].history).__name__, batch[1].history.role)
    print(batch.tokens.get("full", as_padded_tensor=True, padding_value=-1).tolist())

    conversations = Message.from_chats([chat, [*chat[:2], {"role": "assistant", "content": "Lima!"}]])
    print(conversations.batch_size, conversations[1, 2].content, conversations[:, 1].role)
    print([c.render()[-1] for c in conversations.unbind(0)])
    as_dict = history[1].to_dict()
    print(sorted(as_dict), as_dict["content"])
    td = history[2].to_tensordict()
    print(td["role"], td.get("tool_calls"), td.batch_size)
    with set_list_to_stack(True):
        flat = Message(role=["user", "assistant"], content=["hi", "hello"], batch_size=[2])
    print(flat.role, flat[1].content, isinstance(flat.get("role"), (NonTensorStack, list)))
    copy = history.clone()
    print(copy.role == history.role, copy is history)
