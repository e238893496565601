"""Prompts and answers of different lengths as lazy stacks: padding, lists, nested tensors and log-probabilities."""

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from tensordict.utils import set_list_to_stack

VOCABULARY = {word: i for i, word in enumerate("<pad> the cat sat on a mat and slept".split())}


def tokenise(text):
    ids = torch.tensor([VOCABULARY[word] for word in text.split()])
    return TensorDict({"text": text, "input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}, [])


def generate(prompt, length):
    ids = prompt["input_ids"]
    answer = ids.flip(0)[:length]
    scores = torch.linspace(-1, 0, len(answer))
    return prompt.clone().update({"response_ids": answer, "log_probs": scores})


def main():
    texts = ["the cat sat", "a cat", "the cat sat on a mat and slept"]
    prompts = lazy_stack([tokenise(text) for text in texts])
    print(type(prompts).__name__, prompts.batch_size, len(prompts), prompts.stack_dim)
    print([ids.tolist() for ids in prompts.get("input_ids", as_list=True)])
    padded = prompts.get("input_ids", as_padded_tensor=True, padding_value=0)
    print(padded.tolist())
    left = prompts.get("input_ids", as_padded_tensor=True, padding_value=0, padding_side="left")
    print(left.tolist())
    mask = prompts.get("attention_mask", as_padded_tensor=True, padding_side="left", padding_value=False)
    print(mask.sum(-1).tolist(), mask.dtype)
    print(prompts["text"])

    try:
        prompts["input_ids"]
    except RuntimeError:
        print("lengths differ")
    nested = prompts.get("input_ids", as_nested_tensor=True)
    print(nested.is_nested, nested.size(0), [row.tolist() for row in nested.unbind()])

    answers = lazy_stack([generate(prompt, n) for prompt, n in zip(prompts, (2, 1, 4), strict=True)])
    scores = answers.get("log_probs", as_padded_tensor=True, padding_value=0.0)
    print([round(x, 3) for x in scores.sum(-1).tolist()], sorted(answers.keys()))
    answers["reward"] = torch.tensor([1.0, 0.0, 0.5])
    print([row["reward"].item() for row in answers.unbind(0)], answers["reward"].mean().item())
    best = answers[answers["reward"].argmax()]
    print(best["text"], best["response_ids"].tolist())
    good = answers[answers["reward"] > 0.2]
    print(type(good).__name__, good.batch_size, good["text"])

    for part in answers.split(2):
        print(part.batch_size, part.get("response_ids", as_padded_tensor=True, padding_value=-1).tolist())
    answers.append(generate(tokenise("a mat"), 1).set("reward", torch.tensor(0.1)))
    print(len(answers), answers[-1]["response_ids"].tolist())
    joined = LazyStackedTensorDict.lazy_stack([*answers.unbind(0)], 0)
    print(joined.shape, (joined == answers).all())
    flat = torch.cat(list(answers.get("input_ids", as_list=True)))
    print(flat.tolist())

    with set_list_to_stack(True):
        td = TensorDict(batch_size=[2])
        td["words"] = ["cat", "mat"]
        td["lengths"] = [3, 4]
        print(td["words"], td["lengths"] if isinstance(td["lengths"], list) else td["lengths"].tolist())
