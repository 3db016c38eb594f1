"""An endpoint picker in front of a real API server, whose pages it polls."""

from endpoint_picker import EndpointPickerConfig, serve_endpoint_picker
from settings.endpoint_picker import EndpointPickerSettings
from settings.node import ListenSettings
from tests.endpoint_picker.conftest import Running
from tests.endpoint_picker.gateway import Gateway, chat


async def test_the_picked_api_server_answers_the_request_and_its_models_are_known(start_front, config):
    async with start_front() as front:
        settings = EndpointPickerSettings(endpoints=(front.url.removeprefix("http://"),))
        picker = EndpointPickerConfig(settings, listen=ListenSettings("127.0.0.1:0"))
        running = Running(lambda stop, ready: serve_endpoint_picker(picker, stop, ready))
        gateway = Gateway(await running.start())
        outcome = await gateway.answer(chat("hello", model="tiny", max_tokens=3))
        assert outcome.status == 200
        async with front.http.get(f"http://{outcome.destination}/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["tiny"]
        unknown = await gateway.answer(chat("hello", model="other"))
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        assert "'tiny'" in unknown.error["message"]
        await gateway.close()
        await running.stop()


async def test_a_conductor_of_an_earlier_version_judges_nothing_and_loses_nothing(start_front, config):
    async with start_front() as front:
        settings = EndpointPickerSettings(endpoints=(front.url.removeprefix("http://"),), picker_judgement_s=20.0)
        picker = EndpointPickerConfig(settings, listen=ListenSettings("127.0.0.1:0"), admission=config)
        running = Running(lambda stop, ready: serve_endpoint_picker(picker, stop, ready))
        gateway = Gateway(await running.start())
        outcome = await gateway.answer(chat("hello", model="tiny", max_tokens=3), headers={"x-slo-ttft-ms": "0.001"})
        assert (outcome.status, bool(outcome.destination)) == (200, True)
        invalid = await gateway.answer(chat("hello", model="tiny", temperature=9))
        assert (invalid.status, invalid.error["param"]) == (400, "temperature")
        await gateway.close()
        await running.stop()
