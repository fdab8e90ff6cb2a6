//! IPv6 packets of the world that are no flow's: errors about flows and first packets to forwards go to
//! the engine, the rest is the host's.
use std::net::Ipv6Addr;

use slipgate_abi::{
    DropReason, Handover, Protocol, Verdict, portframe::PortFlags, tcp::Flags, vm::VmFlags,
};

use crate::{datapath::*, early::kept, flow6::*, frame6::*, loaded};

const INGRESS: &str = "uplink_ingress";

/// An ICMPv6 error about a packet.
fn error(kind: u8, quoted: &Frame6) -> Frame6 {
    let quote = &quoted.bytes()[14..];
    Frame6 {
        source: Ipv6Addr::new(0x2001, 0xdb8, 0x86dd, 0, 0, 0, 0, 1),
        l4: l4_of(Protocol::Icmpv6, kind, (0, 0), 0, quote),
        ..Frame6::rx(Protocol::Icmpv6)
    }
}

#[test]
fn errors_about_a_flow_go_to_the_engine() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6] {
        for kind in 1..=4 {
            for (program, l2) in [(INGRESS, 14), ("uplink_ingress_l3", 0)] {
                let mut datapath = loaded!();
                datapath.admit6(flow6(protocol));
                let frame = error(kind, &Frame6::tx(protocol).sent_on()).bytes();
                let run = datapath.run(program, &frame[14 - l2..]);
                assert_eq!(run.action, REDIRECT, "{protocol:?} {kind}");
                let (header, rest) = crate::frame::handed(&run.frame);
                assert_eq!(header.code, Handover::Icmp as u8);
                assert_eq!(header.flags, PortFlags::FROM_UPLINK);
                assert_eq!(rest, &frame[12..], "{program} {protocol:?} {kind}");
            }
        }
    }
}

/// A packet in the form in which a fragment of it leaves.
fn as_fragment(of: &Frame6, field: u16) -> Frame6 {
    Frame6 {
        next_header: 44,
        l4: fragment_of(of.next_header, field, 7, &of.l4),
        ..of.clone()
    }
}

#[test]
fn errors_about_a_first_fragment_go_to_the_engine_and_about_later_ones_to_the_host() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6] {
        let mut datapath = loaded!();
        datapath.admit6(flow6(protocol));
        let sent = Frame6::tx(protocol).sent_on();
        let first = error(2, &as_fragment(&sent, FIRST)).bytes();
        let run = datapath.run(INGRESS, &first);
        assert_eq!(run.action, REDIRECT, "{protocol:?}");
        let later = error(2, &as_fragment(&sent, LATER)).bytes();
        datapath.expect_unnoticed(INGRESS, &later);
    }
}

#[test]
fn what_is_no_flow_s_is_the_hosts() {
    let udp = Protocol::Udp;
    let to_another_port = Frame6 {
        l4: l4_of(udp, 0, (443, 61_002), 0, b"data"),
        ..Frame6::rx(udp)
    };
    let neighbour = |kind| Frame6 {
        hop_limit: 255,
        l4: l4_of(Protocol::Icmpv6, kind, (0, 0), 0, &[0; 24]),
        ..Frame6::rx(Protocol::Icmpv6)
    };
    let of_ipv4s_icmp = Frame6 {
        next_header: 1,
        ..Frame6::tx(udp).sent_on()
    };
    let mut frames = vec![
        to_another_port,
        error(1, &Frame6::tx(Protocol::Tcp).sent_on()),
        error(1, &of_ipv4s_icmp),
        error(5, &Frame6::tx(udp).sent_on()),
        Frame6 {
            destination_mac: ROUTER_MAC,
            ..Frame6::rx(udp)
        },
    ];
    frames.extend((133..=137).chain([128]).map(neighbour));
    for frame in frames {
        let mut datapath = loaded!();
        datapath.admit6(flow6(udp));
        datapath.expect_unnoticed(INGRESS, &frame.bytes());
    }
}

/// A fragment of a flow's datagram.
fn fragment(protocol: Protocol, field: u16, id: u32) -> Frame6 {
    let whole = Frame6::rx(protocol);
    Frame6 {
        next_header: 44,
        l4: fragment_of(protocol as u8, field, id, &whole.l4),
        ..whole
    }
}

const FIRST: u16 = 1;
const LATER: u16 = 24;
const BOTH: [(&str, usize); 2] = [(INGRESS, 0), ("uplink_ingress_l3", 14)];

#[test]
fn fragments_of_a_live_flow_go_to_the_engine() {
    for (program, from) in BOTH {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6] {
            let mut datapath = loaded!();
            datapath.admit6(flow6(protocol));
            let frame = |field| fragment(protocol, field, 7).bytes();
            // Before its first fragment nobody can tell whose it is.
            datapath.expect_unnoticed(program, &frame(LATER)[from..]);
            for field in [FIRST, LATER, 0] {
                let run = datapath.run(program, &frame(field)[from..]);
                assert_eq!(run.action, REDIRECT, "{program} {protocol:?} {field}");
                let (header, rest) = crate::frame::handed(&run.frame);
                assert_eq!(header.code, Handover::Fragment as u8);
                assert_eq!(header.flags, PortFlags::FROM_UPLINK);
                // In place of the EtherType is the link.
                assert_eq!(rest[2..], frame(field)[14..]);
            }
        }
    }
}

#[test]
fn a_strangers_fragments_are_the_hosts() {
    for (program, from) in BOTH {
        let mut datapath = loaded!();
        datapath.admit6(flow6(Protocol::Udp));
        let with_ports = |ports| Frame6 {
            l4: fragment_of(17, FIRST, 7, &l4_of(Protocol::Udp, 0, ports, 0, b"data")),
            ..fragment(Protocol::Udp, FIRST, 7)
        };
        let stranger = with_ports((9, 9)).bytes();
        let later = fragment(Protocol::Udp, LATER, 7).bytes();
        datapath.expect_unnoticed(program, &stranger[from..]);
        datapath.expect_unnoticed(program, &later[from..]);
        datapath.expect_unnoticed(program, &fragment(Protocol::Tcp, FIRST, 7).bytes()[from..]);
        let ours = fragment(Protocol::Udp, FIRST, 7).bytes();
        assert_eq!(datapath.run(program, &ours[from..]).action, REDIRECT);
        // What was remembered is the datagram, not its sender.
        let another = fragment(Protocol::Udp, LATER, 8).bytes();
        datapath.expect_unnoticed(program, &another[from..]);
        // One that is a whole datagram changes nothing about another of its name (RFC 6946).
        let atomic = Frame6 {
            l4: fragment_of(17, 0, 7, &l4_of(Protocol::Udp, 0, (9, 9), 0, b"data")),
            ..fragment(Protocol::Udp, 0, 7)
        };
        datapath.expect_unnoticed(program, &atomic.bytes()[from..]);
        assert_eq!(datapath.run(program, &later[from..]).action, REDIRECT);
        // Its name is a stranger's by now.
        datapath.expect_unnoticed(program, &stranger[from..]);
        datapath.expect_unnoticed(program, &later[from..]);
    }
}

#[test]
fn fragments_of_no_live_flow_or_of_a_frozen_vm_go_nowhere() {
    for (program, from) in BOTH {
        let first = fragment(Protocol::Udp, FIRST, 7).bytes();
        for is_frozen in [true, false] {
            let mut datapath = loaded!();
            let slot = datapath.admit6(flow6(Protocol::Udp));
            if is_frozen {
                datapath.vms.change(ROW, |vm| vm.flags |= VmFlags::FROZEN);
                let run = datapath.run(program, &first[from..]);
                assert_eq!(run.action, SHOT, "{program}");
                assert_eq!(datapath.only_reason(ROW), DropReason::Frozen);
            } else {
                slot.set_verdict(Verdict::Free);
                datapath.expect_unnoticed(program, &first[from..]);
            }
        }
    }
}

/// Of another uplink's network, a packet with a flow's tuple is nobody's.
#[test]
fn a_flow_s_packets_come_by_its_uplink() {
    let mut datapath = loaded!();
    datapath.admit6(flow6(Protocol::Udp));
    datapath.slots.change(9, |slot| slot.uplink_ifindex = 77);
    let frame = Frame6::rx(Protocol::Udp).bytes();
    datapath.expect_drop(INGRESS, &frame, ROW, DropReason::NoFlow);
    let quoted = error(1, &Frame6::tx(Protocol::Udp).sent_on()).bytes();
    datapath.expect_unnoticed(INGRESS, &quoted);
}

/// A packet to port 8080 of an address.
fn to_forward(protocol: Protocol, destination: Ipv6Addr, flags: u8) -> Frame6 {
    Frame6 {
        destination,
        // A test run wants a whole header behind what it takes for that of Ethernet.
        l4: l4_of(protocol, 0, (443, 8_080), flags, b"eight by"),
        ..Frame6::rx(protocol)
    }
}

#[test]
fn first_packets_to_forwards_of_ipv6_go_to_their_vm() {
    let other = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 10);
    let any = Ipv6Addr::UNSPECIFIED;
    for (host, protocol, flags, hit) in [
        (NAT6, Protocol::Tcp, Flags::SYN, true),
        (NAT6, Protocol::Udp, 0, true),
        (any, Protocol::Tcp, Flags::SYN, true),
        (any, Protocol::Udp, 0, true),
        (NAT6, Protocol::Tcp, Flags::ACK, false),
        (other, Protocol::Tcp, Flags::SYN, false),
    ] {
        for (program, l2) in [(INGRESS, 14), ("uplink_ingress_l3", 0)] {
            let mut datapath = loaded!();
            datapath.forward6((host, 8_080, protocol), (VM, 80));
            // A forward of IPv4 is no forward of IPv6.
            datapath.forward((NAT, 8_081, protocol), (VM, 80));
            let frame = to_forward(protocol, NAT6, flags).bytes();
            if !hit {
                datapath.expect_unnoticed(program, &frame[14 - l2..]);
                continue;
            }
            let run = datapath.run(program, &frame[14 - l2..]);
            assert_eq!(run.action, REDIRECT, "{program} {host} {protocol:?}");
            let (header, rest) = crate::frame::handed(&run.frame);
            assert_eq!(header.code, Handover::Forward as u8);
            assert_eq!((header.id, header.flags), (VM, PortFlags::FROM_UPLINK));
            assert_eq!(rest, &frame[12..], "as it came");
        }
    }
}

#[test]
fn forwards_of_ipv6_whose_vm_is_gone_or_frozen_drop() {
    let frame = to_forward(Protocol::Udp, NAT6, 0).bytes();
    let mut datapath = loaded!();
    datapath.forward6((NAT6, 8_080, Protocol::Udp), (VM + 1, 80));
    datapath.expect_drop(INGRESS, &frame, 0, DropReason::StaleVm);
    let mut datapath = loaded!();
    datapath.forward6((NAT6, 8_080, Protocol::Udp), (VM, 80));
    datapath.vms.change(ROW, |vm| vm.flags |= VmFlags::FROZEN);
    datapath.expect_drop(INGRESS, &frame, ROW, DropReason::Frozen);
}

/// Any neighbour on the link may send to loopback with the host's MAC.
#[test]
fn loopback_of_ipv6_is_no_forwards_whatever_leads_there() {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        for host in [Ipv6Addr::LOCALHOST, Ipv6Addr::UNSPECIFIED] {
            let mut datapath = loaded!();
            datapath.forward6((host, 8_080, protocol), (VM, 80));
            let frame = to_forward(protocol, Ipv6Addr::LOCALHOST, Flags::SYN);
            datapath.expect_unnoticed(INGRESS, &frame.bytes());
        }
    }
}

/// An extension header of `units` of 8 bytes beyond the first.
fn extension(next: u8, units: u8) -> Vec<u8> {
    let mut header = vec![0; 8 * (1 + usize::from(units))];
    header[..2].copy_from_slice(&[next, units]);
    header
}

/// The packet behind extension headers of these numbers and lengths.
fn behind(headers: &[(u8, u8)], packet: &Frame6) -> Frame6 {
    let (mut next_header, mut l4) = (packet.next_header, packet.l4.clone());
    for (number, units) in headers.iter().rev() {
        let mut header = extension(next_header, *units);
        if *number == 44 {
            header = fragment_of(next_header, 1, 7, &[]);
        }
        l4 = [header, l4].concat();
        next_header = *number;
    }
    Frame6 {
        next_header,
        l4,
        ..packet.clone()
    }
}

/// The host would answer a segment that it has no socket for with RST.
#[test]
fn a_flows_packet_with_extension_headers_is_dropped_and_others_are_the_hosts() {
    let known: [&[(u8, u8)]; 7] = [
        &[(60, 0)],
        &[(0, 0)],
        &[(43, 1)],
        &[(60, 30)],
        &[(0, 0), (43, 2), (60, 0)],
        &[(0, 0), (60, 0), (43, 0), (60, 1)],
        &[(60, 0), (44, 0)],
    ];
    // Too many, and one that is not known.
    let unknown: [&[(u8, u8)]; 2] = [&[(60, 0); 5], &[(60, 0), (135, 0)]];
    for (program, l2) in [(INGRESS, 14), ("uplink_ingress_l3", 0)] {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6] {
            let frame = |headers| {
                let bytes = behind(headers, &Frame6::rx(protocol)).bytes();
                bytes[14 - l2..].to_vec()
            };
            for headers in known.into_iter().chain(unknown) {
                let mut datapath = loaded!();
                datapath.expect_unnoticed(program, &frame(headers));
                let slot = datapath.admit6(flow6(protocol));
                if unknown.contains(&headers) {
                    datapath.expect_unnoticed(program, &frame(headers));
                    continue;
                }
                let run = datapath.run(program, &frame(headers));
                assert_eq!(run.action, SHOT, "{program} {protocol:?} {headers:?}");
                assert_eq!(datapath.only_reason(ROW), DropReason::ExtensionHeader);
                let dropped = datapath.drops.get(ROW).get(DropReason::ExtensionHeader);
                let l3_len = (frame(headers).len() - l2) as u64;
                assert_eq!((dropped.packets, dropped.bytes), (1, l3_len));
                assert_eq!(slipgate_abi::cell::load64(slot.rx_packets()), 0);
                let other = datapath;
                other.slots.change(9, |slot| slot.uplink_ifindex += 1);
                other.drops.change(ROW, |drops| *drops = Default::default());
                other.expect_unnoticed(program, &frame(headers));
            }
        }
    }
}

/// One whose chain of headers ends before the transport header, or lies about its length, is no flow's.
/// Wrong lengths without any extension header are the host's to count.
#[test]
fn a_flows_packet_with_a_wrong_transport_header_is_the_hosts() {
    for (program, l2) in [(INGRESS, 14), ("uplink_ingress_l3", 0)] {
        for (protocol, at, wrong) in [(Protocol::Udp, 5, 7), (Protocol::Tcp, 12, 4 << 4)] {
            let mut datapath = loaded!();
            datapath.admit6(flow6(protocol));
            let mut bytes = Frame6::rx(protocol).bytes()[14 - l2..].to_vec();
            bytes[l2 + 40 + at] = wrong;
            datapath.expect_unnoticed(program, &bytes);
        }
    }
}

/// What is behind the packet's end is padding of the link, whatever it looks like.
#[test]
fn a_packet_that_ends_in_an_extension_header_is_no_flows() {
    for (program, l2) in [(INGRESS, 14), ("uplink_ingress_l3", 0)] {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmpv6] {
            for number in [0, 43, 60] {
                let frame = behind(&[(number, 0)], &Frame6::rx(protocol));
                for payload_len in [0, 1, 4, 7, 8, 15] {
                    let mut bytes = frame.bytes()[14 - l2..].to_vec();
                    let mut datapath = loaded!();
                    datapath.admit6(flow6(protocol));
                    assert_eq!(datapath.run(program, &bytes).action, SHOT);
                    datapath
                        .drops
                        .change(ROW, |drops| *drops = Default::default());
                    set_payload_len(&mut bytes[l2..], payload_len);
                    datapath.expect_unnoticed(program, &bytes);
                }
            }
        }
    }
}

/// Neither handed over by what the padding says, nor kept.
#[test]
fn a_packet_that_ends_in_its_fragment_header_is_no_fragment_of_a_guests() {
    for (program, l2) in [(INGRESS, 14), ("uplink_ingress_l3", 0)] {
        let mut datapath = loaded!();
        datapath.admit6(flow6(Protocol::Udp));
        let frame = |field| fragment(Protocol::Udp, field, 7).bytes()[14 - l2..].to_vec();
        assert_eq!(datapath.run(program, &frame(FIRST)).action, REDIRECT);
        for field in [FIRST, LATER, 0] {
            for payload_len in [0, 4, 7] {
                let mut bytes = frame(field);
                set_payload_len(&mut bytes[l2..], payload_len);
                datapath.expect_unnoticed(program, &bytes);
            }
        }
        assert_eq!(datapath.drops_of(ROW), []);
        assert_eq!(kept(&datapath), 0);
        // The guest's datagram is still known.
        assert_eq!(datapath.run(program, &frame(LATER)).action, REDIRECT);
    }
}

/// Has the packet end so many bytes behind its header.
fn set_payload_len(l3: &mut [u8], len: u16) {
    l3[4..6].copy_from_slice(&len.to_be_bytes());
}

#[test]
fn extension_headers_that_lie_lead_nowhere() {
    for (program, l2) in [(INGRESS, 14), ("uplink_ingress_l3", 0)] {
        let mut datapath = loaded!();
        datapath.admit6(flow6(Protocol::Udp));
        let mut beyond = behind(&[(60, 0)], &Frame6::rx(Protocol::Udp));
        beyond.l4[1] = 255;
        let cut = Frame6 {
            l4: behind(&[(60, 0)], &Frame6::rx(Protocol::Udp)).l4[..14].to_vec(),
            ..beyond.clone()
        };
        for frame in [beyond, cut] {
            datapath.expect_unnoticed(program, &frame.bytes()[14 - l2..]);
        }
    }
}
