"""The version that the agent names, also where it was never installed."""

from importlib import metadata

from rankscope import agent
from rankscope.agent.delivery.address import address_of


def test_it_is_that_of_the_installation():
    assert agent.__version__ == metadata.version("rankscope")
    assert (
        address_of("http://h:1", None).headers["User-Agent"].endswith(metadata.version("rankscope"))
    )


def test_a_checkout_on_the_module_path_posts_without_one(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert agent.__version__ == "unknown"
    assert address_of("http://h:1", None).headers["User-Agent"] == "rankscope-agent/unknown"
