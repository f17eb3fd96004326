"""What a rank says of itself."""

import json
import subprocess
import sys
import types
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.model.configuration import configuration
from rankscope.agent.process.git import commit_of


def made(width=4, **more):
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(3, width), b=nn.Linear(width, 2, **more)))


def facts(model, optimizer=None):
    return configuration(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1))


def test_it_is_json_and_has_no_secrets(monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter2")
    monkeypatch.setattr("sys.argv", ["train.py", "--password", "hunter2"])
    assert "hunter2" not in json.dumps(facts(made()))


def test_equal_models_are_reported_alike_whatever_their_values():
    one, other = made(), made()
    with torch.no_grad():
        other.a.weight.zero_()
    assert facts(one) == facts(other)


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (lambda m: made(width=5), {"parameters_digest"}),
        (lambda m: made(bias=False), {"parameters_digest"}),
        (lambda m: made().half(), {"parameters_digest", "dtypes"}),
        (
            lambda m: nn.Sequential(OrderedDict(reversed(list(made().named_children())))),
            {"parameters_digest"},
        ),
        (lambda m: m.a.requires_grad_(False) and m, {"trainable_digest", "frozen_tensors"}),
        (lambda m: m.b.register_buffer("c", torch.ones(2)) or m, {"buffers_digest"}),
        (lambda m: m.eval(), {"training_mode"}),
    ],
    ids=["shape", "missing", "dtype", "order", "frozen", "buffer", "mode"],
)
def test_what_differs_shows(change, keys):
    one, other = facts(made()), facts(change(made()))
    assert keys <= {k for k in one if one[k] != other[k]}


class Own(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate, self.key, self.shape = rate, "hunter2", (1, 2)
        self.inner = nn.ModuleList([nn.Dropout(rate), nn.Dropout(0.1)])
        self.linear = nn.Linear(2, 2)


def test_settings_that_no_tensor_shows_are_counted():
    one = facts(Own(0.5))
    assert one["modules"] == {"Own": 1, "ModuleList": 1, "Dropout": 2, "Linear": 1}
    assert one["module_settings"]["Dropout.p"] == {"0.1": 1, "0.5": 1}
    assert one["module_settings"]["Own().rate"] == {"0.5": 1}
    assert one["module_settings"]["Own().shape"] == {"(1, 2)": 1}
    assert list(one["module_settings"])[-1].startswith("Own()")
    assert facts(Own(0.1))["module_settings"] != one["module_settings"]


def test_texts_of_the_users_own_classes_are_not_reported():
    assert "hunter2" not in json.dumps(facts(Own(0.5)))


def test_frozen_parameters_are_named_or_else_the_trained_ones():
    model = made()
    model.a.requires_grad_(False)
    assert facts(model)["frozen"] == ["a.weight", "a.bias"]
    large = nn.Sequential(*(nn.Linear(1, 1) for _ in range(102)))
    large[:101].requires_grad_(False)
    assert facts(large)["trained"] == ["101.weight", "101.bias"]
    assert "frozen" not in facts(large)


def test_libraries_of_environments_that_are_loaded_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", types.ModuleType("gymnasium"))
    assert facts(nn.Linear(2, 2))["environments"] == ["gymnasium"]
    monkeypatch.delitem(sys.modules, "gymnasium")
    assert facts(nn.Linear(2, 2))["environments"] == []


def test_tied_weights_are_named():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert facts(model)["tied"] == [["embedding.weight", "head.weight"]]


def test_an_optimizer_that_holds_another_model_is_seen():
    model = made()
    whole = facts(model)["optimizer_tensors"]
    assert (whole["of_the_model"], whole["share_of_trainable"], whole["missing"]) == (1.0, 1.0, [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.b = nn.Linear(4, 2)
    partly = facts(model, optimizer)["optimizer_tensors"]
    assert (partly["of_the_model"], partly["share_of_trainable"]) == (0.5, 0.5)
    assert partly["missing"] == ["b.weight", "b.bias"]
    assert partly["missing_count"] == 2


def test_the_order_of_the_optimizers_tensors_shows():
    model = made()
    turned = torch.optim.SGD(list(model.parameters())[::-1], lr=0.1)
    one, other = facts(model), facts(model, turned)
    differing = {k for k in one if one[k] != other[k]}
    assert differing == {"optimizer_tensors"}


def test_settings_of_ddp(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(made(), static_graph=True)
        plain = facts(model)
        assert plain["parameters_digest"] == facts(made())["parameters_digest"]
        assert plain["model"] == "Sequential"
        settings = plain["data_parallel"]
        assert (settings["broadcast_buffers"], settings["static_graph"]) == (True, True)
        assert settings["find_unused_parameters"] is False
        assert plain["data_parallel"]["communication_hooks"] == []
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        hooked = facts(model)["data_parallel"]
        assert hooked["communication_hooks"] == ["fp16_compress_hook"]
        assert (hooked["group_size"], hooked["backend"]) == (1, "gloo")
        assert "local_from" not in hooked
        local = DistributedDataParallel(made())
        state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=20)
        local.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        assert facts(local)["data_parallel"]["local_from"] == 20
        low = DistributedDataParallel(made())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3)
        low.register_comm_hook(
            state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
        )
        hooked = facts(low)["data_parallel"]
        assert "fp16_compress" in hooked["communication_hooks"][0]
        assert hooked["low_rank"] == {"rank": 3, "least_rate": 2, "feedback": True}
        json.dumps([facts(model), facts(low)])
    finally:
        torch.distributed.destroy_process_group()
    assert facts(made())["data_parallel"] == {}


@pytest.mark.parametrize(
    ("shape", "dimensions", "dealt_over"),
    [
        ((4,), ("shard",), {"first": 0, "step": 1, "count": 4}),
        ((2, 2), ("replicate", "shard"), {"first": 0, "step": 1, "count": 2}),
        ((2, 2), ("shard", "tensor"), {"first": 0, "step": 2, "count": 2}),
    ],
    ids=["FSDP", "HSDP", "beside tensor parallelism"],
)
def test_over_which_ranks_parameters_are_dealt_out(shape, dimensions, dealt_over):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.support.fully_sharded import fully_shard

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=dimensions)
        assert facts(made())["sharded_over"] == {}
        model = made()
        fully_shard(model, mesh=mesh["shard"] if "tensor" in dimensions else mesh)
        assert facts(model)["sharded_over"] == dealt_over
    finally:
        torch.distributed.destroy_process_group()


def test_a_lazy_module_is_no_obstacle():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert configuration(model, optimizer)["parameter_tensors"] == 2


def git(folder, *args):
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    (root / "deep" / "er").mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    git(root, "commit", "-q", "--allow-empty", "-m", "one")
    return root


def test_the_commit_of_a_branch_of_a_tag_and_of_packed_references(repository):
    expected = git(repository, "rev-parse", "HEAD")
    assert commit_of(repository / "deep" / "er") == expected
    git(repository, "pack-refs", "--all")
    assert commit_of(repository) == expected
    git(repository, "checkout", "-q", "--detach")
    assert commit_of(repository) == expected


def test_the_commit_of_a_worktree(repository, tmp_path):
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "two")
    assert commit_of(tmp_path / "tree") == git(tmp_path / "tree", "rev-parse", "HEAD")
    assert commit_of(tmp_path / "tree") != commit_of(repository)


def test_no_repository_none_to_read_and_one_without_a_commit(tmp_path):
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    assert commit_of(tmp_path / "empty") == ""
    odd = tmp_path / "odd"
    (odd / ".git").mkdir(parents=True)
    (odd / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert commit_of(odd) == ""
    (odd / ".git" / "HEAD").write_text("ref: refs/heads/a/../../../../secret")
    (tmp_path / "secret").write_text("password")
    assert commit_of(odd) == ""
