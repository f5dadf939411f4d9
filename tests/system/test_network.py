"""Tests of network routes."""

from dalsegno.system.network import has_default_route

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
OWN = "eth0\t0090CF0A\t00000000\t0001\t0\t0\t0\t00F0FFFF\t0\t0\t0\n"
OUT = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
SIX = f"{'0' * 32} 00 {'0' * 32} 00 %s 00000400 00000001 00000000 00000003     %s\n"


def test_host_without_default_route_reaches_only_its_networks():
    assert not has_default_route("")
    assert not has_default_route(HEAD + OWN + SIX % ("0" * 32, "lo"))
    assert has_default_route(HEAD + OWN + OUT)
    assert has_default_route(HEAD + OWN + SIX % ("fe80" + "0" * 27 + "1", "eth0"))
