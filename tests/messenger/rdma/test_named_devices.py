"""Devices that were asked for by name, on a machine that has none of them."""

import logging
from pathlib import Path

import pytest

from messenger import Messenger, MessengerConfig
from settings.keys import assemble


def test_auto_tells_that_the_devices_named_are_not_there_and_goes_by_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messenger = Messenger(
        assemble(MessengerConfig, transport="auto", shm_dir=tmp_path, rdma_devices=("mlx5_9",)),
        node_id="a",
        incarnation=1,
    )
    with caplog.at_level(logging.WARNING):
        endpoint = messenger.start()
    try:
        assert not endpoint.rdma
        assert endpoint.tcp_port
        assert any("rdma is not used" in record.message for record in caplog.records)
    finally:
        messenger.close()
