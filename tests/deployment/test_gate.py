"""The gate passes on what registered nodes call, and nothing else."""

import asyncio
import ssl
from collections.abc import Callable

import httpx
import pytest
from flwr.superlink.routers.control.router import router as control
from flwr.superlink.routers.fleet.router import router as fleet

from flwr_safedshb.deployment.gate import CALLS, gate


def answer(request: httpx.Request) -> httpx.Response:
    """Stand for the SuperLink: say what came."""
    told = {"path": request.url.path, "size": len(request.content)}
    told |= {key: request.headers.get(key) for key in ("host", "x-signature")}
    return httpx.Response(201, json=told, headers={"x-answer": "yes"})


def call(
    method: str,
    path: str,
    body: bytes = b"",
    max_bytes: int = 100,
    superlink: Callable[[httpx.Request], httpx.Response] = answer,
) -> httpx.Response:
    inside = httpx.MockTransport(superlink)
    app = gate("10.0.0.1:9091", ssl.create_default_context(), max_bytes, inside)

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="https://g") as user:
            headers = {"x-signature": "abc"}
            return await user.request(method, path, content=body, headers=headers)

    return asyncio.run(asked())


@pytest.mark.parametrize("name", sorted(CALLS))
def test_calls_of_nodes_pass_with_their_signature(name: str) -> None:
    found = call("POST", f"/v1/fleet/{name}", b"x" * 100)
    assert found.status_code == 201
    assert found.headers["x-answer"] == "yes"
    assert found.json() == {
        "path": f"/v1/fleet/{name}",
        "size": 100,
        "host": "10.0.0.1:9091",
        "x-signature": "abc",
    }


def paths(router: object) -> set[str]:
    return {route.path for route in router.routes}  # type: ignore[attr-defined]


def test_every_call_of_this_flower_is_known() -> None:
    kept_inside = {"register-node", "unregister-node"}
    assert paths(fleet) == {f"/v1/fleet/{name}" for name in CALLS | kept_inside}


def test_operators_and_processes_do_not_get_through() -> None:
    closed = [*paths(control), "/v1/fleet/register-node", "/v1/fleet/unregister-node"]
    closed += ["/", "/docs", "/openapi.json", "/v1/runtime/acquire-task"]
    closed += ["/v1/fleet/../control/start-run", "/v1/fleet/pull-messages/x"]
    closed += ["/v1/fleet/..%2Fcontrol%2Fstart-run", "//v1/fleet/pull-messages"]
    assert "/v1/control/register-node" in closed
    for path in closed:
        assert call("POST", path).status_code in (404, 405), path
    assert call("GET", "/v1/fleet/pull-messages").status_code == 405


def test_a_body_is_bounded_while_it_arrives() -> None:
    assert call("POST", "/v1/fleet/push-object", b"x" * 101).status_code == 413
    with pytest.raises(ValueError, match="max_bytes=0"):
        call("POST", "/v1/fleet/push-object", max_bytes=0)


def test_a_superlink_that_is_down_is_said_to_be() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    found = call("POST", "/v1/fleet/pull-messages", superlink=refuse)
    assert found.status_code == 502
