"""The JSON files of LEAF's scripts (Caldas et al. 2018), whatever their samples are."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim import check

LAYOUT = "LEAF's files are {users: [...], num_samples: [...], user_data: {user: {x: [...], y: [...]}}}"


def users(dataset: str, file: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Each user with its x and y, as many of both as num_samples says; anything else is refused in one line."""

    def need(valid: bool, problem: str) -> None:
        if not valid:
            raise check.InputError(f"dataset={dataset}: {file}: {problem}; {LAYOUT}")

    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise check.InputError(f"dataset={dataset}: {file} is no JSON, or it is truncated ({error})") from error
    need(isinstance(content, dict), "is a list or a value")
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        need(key in content, f"{key} is missing")
        need(isinstance(content[key], kind), f"{key} is no {kind.__name__}")
    names, counts, data = content["users"], content["num_samples"], content["user_data"]
    need(len(names) == len(counts), f"{len(names)} users but {len(counts)} num_samples")
    need(all(isinstance(name, str) for name in names), "users are not all names")
    need(len(set(names)) == len(names), "a user is there twice")
    if differing := sorted(set(names) ^ set(data)):
        need(False, f"{differing[0]} is in only one of users and user_data")
    for name, count in zip(names, counts, strict=True):
        need(isinstance(data[name], dict), f"user_data of {name} has no keys")
        for key in ("x", "y"):
            need(isinstance(data[name].get(key), list), f"user {name} has no list {key}")
        x, y = data[name]["x"], data[name]["y"]
        need(count != 0 and len(x) > 0, f"user {name} has no samples")
        need(len(x) == len(y) == count, f"user {name} has {len(x)} x, {len(y)} y and num_samples {count}")
        yield name, x, y
