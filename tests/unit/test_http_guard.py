"""Which addresses may be connected to on behalf of a job or of a receiver of alerts."""

import pytest

from dataloader.pipelines import http

FORBIDDEN = [
    # Link-local, and metadata services of clouds: AWS, Google, Azure, Alibaba, Oracle, Scaleway, Akamai.
    *("169.254.0.1", "169.254.169.254", "169.254.170.2", "169.254.255.255", "fe80::1", "febf::1", "fe80::1%eth0"),
    *("fd00:ec2::254", "fd00:ec2::23", "fd00:ec2::253", "fd20:ce::254", "168.63.129.16", "100.100.100.200"),
    *("192.0.0.192", "fd00:42::42", "fd00:a9fe:a9fe::1"),
    # The same within IPv6: mapped, compatible, translated (SIIT), NAT64, 6to4, Teredo (server, client), ISATAP.
    *("::ffff:169.254.169.254", "::ffff:a9fe:1", "::169.254.169.254", "::ffff:0:a9fe:a9fe", "64:ff9b::a9fe:a9fe"),
    *("64:ff9b::a9fe:1", "64:ff9b:1::a9fe:a9fe", "64:ff9b:1:a9fe:a9:fe00::", "2002:a9fe:a9fe::1", "2002:a9fe:1::"),
    *("2001:0:a9fe:a9fe::1", "2001:0:808:808:0:0:5601:5601", "fd12::5efe:a9fe:1", "2600::200:5efe:a9fe:1"),
    *("2002:7f00:1::1", "2002:808:808::1", "2600::5efe:7f00:1", "fd12::5efe:a00:1"),  # tunnels, wherever they lead
    *("2600:64::a9fe:a9fe", "64:ff9b::6464:64c8", "::ffff:168.63.129.16"),
    # Addresses of no one machine.
    *("0.0.0.0", "0.1.2.3", "::", "::ffff:0.0.0.0", "255.255.255.255", "240.0.0.1", "224.0.0.1", "239.1.2.3"),
    *("ff02::1", "ff0e::1", "::ffff:224.0.0.1", "64:ff9b::e000:1", "fec0::1", "100::1", "4000::1", "::2"),
]
INTERNAL = [
    *("127.0.0.1", "127.8.9.1", "::1", "10.1.2.3", "172.16.0.1", "192.168.0.7", "100.64.0.1", "198.18.0.1"),
    *("fd12::1", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1"),
    "2001:db8::1",
]
PUBLIC = ["8.8.8.8", "1.1.1.1", "2600::1", "2a00:1450:4001::200e", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", [*FORBIDDEN, *INTERNAL, *PUBLIC])
def test_only_operators_let_something_be_sent_to_their_own_networks_and_nobody_to_some_addresses(address: str) -> None:
    assert http.is_forbidden(address) == (address in FORBIDDEN)
    assert http.is_internal(address) == (address not in PUBLIC), "an Alertmanager mostly has one of INTERNAL"
