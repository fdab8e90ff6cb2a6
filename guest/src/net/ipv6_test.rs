use smoltcp::{
    time::Duration,
    wire::{NdiscPrefixInformation, NdiscRouterFlags},
};

use super::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 15];
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const PREFIX: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 7, 9, 0, 0, 0, 0);

struct Advertisement {
    router: Ipv6Addr,
    hop_limit: u8,
    router_seconds: u64,
    flags: NdiscPrefixInfoFlags,
    prefix: (Ipv6Addr, u8),
    prefix_seconds: u64,
    mtu: u32,
}

impl Default for Advertisement {
    fn default() -> Self {
        Advertisement {
            router: ROUTER,
            hop_limit: 255,
            router_seconds: 1800,
            flags: NdiscPrefixInfoFlags::ON_LINK | NdiscPrefixInfoFlags::ADDRCONF,
            prefix: (PREFIX, 64),
            prefix_seconds: 3600,
            mtu: 1400,
        }
    }
}

impl Advertisement {
    fn frame(&self) -> Vec<u8> {
        let lifetime = Duration::from_secs(self.prefix_seconds);
        let message = Icmpv6Repr::Ndisc(NdiscRepr::RouterAdvert {
            hop_limit: 64,
            flags: NdiscRouterFlags::empty(),
            router_lifetime: Duration::from_secs(self.router_seconds),
            reachable_time: Duration::ZERO,
            retrans_time: Duration::ZERO,
            lladdr: Some(EthernetAddress([2; 6]).into()),
            mtu: Some(self.mtu),
            prefix_info: Some(NdiscPrefixInformation {
                prefix_len: self.prefix.1,
                flags: self.flags,
                valid_lifetime: lifetime,
                preferred_lifetime: lifetime,
                prefix: self.prefix.0,
            }),
        });
        let packet = Ipv6Repr {
            src_addr: self.router,
            dst_addr: ALL_NODES,
            next_header: IpProtocol::Icmpv6,
            payload_len: message.buffer_len(),
            hop_limit: self.hop_limit,
        };
        let mut bytes = vec![0; 14 + 40 + message.buffer_len()];
        let mut frame = EthernetFrame::new_unchecked(&mut bytes);
        frame.set_ethertype(EthernetProtocol::Ipv6);
        let mut ip = Ipv6Packet::new_unchecked(frame.payload_mut());
        packet.emit(&mut ip);
        message.emit(
            &self.router,
            &ALL_NODES,
            &mut Icmpv6Packet::new_unchecked(ip.payload_mut()),
            &ChecksumCapabilities::default(),
        );
        bytes
    }

    fn gives(&self) -> Option<Ipv6Lease> {
        advertised(&self.frame(), MAC)
    }
}

#[test]
fn an_address_is_of_the_prefix_and_the_mac_address() {
    let due = Ipv6Lease {
        address: "2001:db8:7:9:0:ff:fe00:f".parse().unwrap(),
        prefix: 64,
        router: ROUTER,
        mtu: Some(1400),
    };
    assert_eq!(Advertisement::default().gives(), Some(due));
    assert_eq!(
        link_local(MAC),
        "fe80::ff:fe00:f".parse::<Ipv6Addr>().unwrap()
    );
    let only_addresses = Advertisement {
        flags: NdiscPrefixInfoFlags::ADDRCONF,
        ..Advertisement::default()
    };
    let due = Ipv6Lease { prefix: 128, ..due };
    assert_eq!(
        only_addresses.gives(),
        Some(due),
        "nobody else is on the link"
    );
    for mtu in [1279, 1 << 16] {
        let wrong = Advertisement {
            mtu,
            ..Advertisement::default()
        };
        assert_eq!(wrong.gives().unwrap().mtu, None, "an MTU of {mtu}");
    }
}

#[test]
fn what_gives_no_address_is_passed_over() {
    let base = Advertisement::default;
    let wrong = [
        (
            "from another link",
            Advertisement {
                hop_limit: 254,
                ..base()
            },
        ),
        (
            "of no link-local address",
            Advertisement {
                router: PREFIX,
                ..base()
            },
        ),
        (
            "no default router",
            Advertisement {
                router_seconds: 0,
                ..base()
            },
        ),
        (
            "a prefix that ended",
            Advertisement {
                prefix_seconds: 0,
                ..base()
            },
        ),
        (
            "a short prefix",
            Advertisement {
                prefix: (PREFIX, 56),
                ..base()
            },
        ),
        (
            "the link's own prefix",
            Advertisement {
                prefix: (ROUTER, 64),
                ..base()
            },
        ),
        (
            "for DHCP alone",
            Advertisement {
                flags: NdiscPrefixInfoFlags::ON_LINK,
                ..base()
            },
        ),
    ];
    for (what, advertisement) in wrong {
        assert_eq!(advertisement.gives(), None, "{what}");
    }
    let whole = base().frame();
    for len in 0..whole.len() {
        assert_eq!(advertised(&whole[..len], MAC), None, "cut to {len} bytes");
    }
    for at in 14 + 40..whole.len() {
        let mut bad = whole.clone();
        bad[at] ^= 0x40;
        assert_eq!(advertised(&bad, MAC), None, "byte {at}");
    }
}
