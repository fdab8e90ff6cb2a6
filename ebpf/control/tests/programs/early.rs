//! Fragments of the world that come before the first one of their datagram, and first ones to forwards.
use std::net::{Ipv4Addr, Ipv6Addr};

use slipgate_abi::{
    DropReason, EarlyFragment, EarlyFragmentRef, EarlyTag, Handover, Protocol,
    datapath::fragment_table::{Datagram, Datagram6},
    early_fragment::{
        EARLY_CLAIMS, MOST_L3_LEN, PLACES, claim, filled, has_hash, place, tag, taken,
    },
    portframe::{PortFlags, link},
    tcp::Flags,
    vm::VmFlags,
};

use crate::{datapath::*, flow6::*, frame::*, frame6::*, loaded, mapped::Mapped, pool::Datapath};

const INGRESS: [(&str, usize); 2] = [("uplink_ingress", 0), ("uplink_ingress_l3", 14)];
const MORE: u16 = 0x2000;
const LATER: u16 = 3;
/// A test run wants a whole header behind what it takes for that of Ethernet.
const MUCH: &[u8] = b"data of a fragment, as much as a test run wants";
const FIRST6: u16 = 1;
const LATER6: u16 = 24;

fn tags(datapath: &Datapath) -> Mapped<EarlyTag> {
    Mapped::of(&datapath.ebpf, "EARLY_TAGS")
}

fn claims(datapath: &Datapath) -> Mapped<EarlyTag> {
    Mapped::of(&datapath.ebpf, EARLY_CLAIMS)
}

/// Number of copies that were ever kept.
pub(crate) fn kept(datapath: &Datapath) -> u64 {
    claims(datapath).get(PLACES).word
}

/// A fragment of a datagram of IPv4.
fn of_ipv4(field: u16, payload: &[u8]) -> Vec<u8> {
    let frame = Frame {
        fragment: field,
        payload: payload.to_vec(),
        ..Frame::rx(Protocol::Udp)
    };
    frame.bytes()
}

fn of_ipv6(field: u16, data: &[u8]) -> Vec<u8> {
    let whole = Frame6::rx(Protocol::Udp);
    let frame = Frame6 {
        next_header: 44,
        l4: fragment_of(17, field, 7, data),
        ..whole
    };
    frame.bytes()
}

/// Hash of the datagram that a frame is of.
fn hash_of(frame: &[u8]) -> u32 {
    if frame[12] == 0x08 {
        let l3 = &frame[14..];
        let address = |at: usize| Ipv4Addr::new(l3[at], l3[at + 1], l3[at + 2], l3[at + 3]);
        let id = u16::from_be_bytes([l3[4], l3[5]]);
        Datagram::new(address(12).into(), address(16).into(), id, l3[9]).hash()
    } else {
        let l3 = &frame[14..];
        let address = |at: usize| {
            let octets: [u8; 16] = l3[at..at + 16].try_into().unwrap();
            Ipv6Addr::from(octets)
        };
        let id = u32::from_be_bytes([l3[44], l3[45], l3[46], l3[47]]);
        Datagram6::new(address(8).into(), address(24).into(), id).hash()
    }
}

#[test]
fn an_early_fragment_is_the_hosts_and_a_copy_is_kept() {
    for (program, from) in INGRESS {
        for frame in [of_ipv4(LATER, MUCH), of_ipv6(LATER6, MUCH)] {
            for number in [0, 1, u64::from(PLACES) + 5, u64::from(u32::MAX) + 1] {
                let datapath = loaded!();
                claims(&datapath).change(PLACES, |next| next.word = number);
                datapath.expect_unnoticed(program, &frame[from..]);
                assert_eq!(kept(&datapath), number + 1);
                let word = tags(&datapath).get(place(number)).word;
                let hash = hash_of(&frame);
                assert_eq!(
                    word,
                    tag(hash, number),
                    "the tag by which an engine finds it"
                );
                assert!(has_hash(word, hash));
                let copies = Mapped::<EarlyFragment>::of(&datapath.ebpf, "EARLY_FRAGMENTS");
                // SAFETY: an element of the map, which outlives this.
                let copy = unsafe { EarlyFragmentRef::new(copies.at(place(number))) };
                let mut buffer = [0; MOST_L3_LEN];
                let came = copy.read(&mut buffer).unwrap();
                assert_eq!(&buffer[..came.len], &frame[14..]);
                assert_ne!(came.at_ns, 0);
                assert_eq!(came.ifindex, TAP);
            }
        }
    }
}

/// A run may stall behind its claim of a number while others come around the whole ring.
#[test]
fn no_copy_is_written_by_two_runs() {
    let round = u64::from(PLACES);
    for (program, from) in INGRESS {
        for frame in [of_ipv4(LATER, MUCH), of_ipv6(LATER6, MUCH)] {
            let datapath = loaded!();
            let copies = Mapped::<EarlyFragment>::of(&datapath.ebpf, "EARLY_FRAGMENTS");
            let number = round + 5;
            for (before, is_kept) in [
                (claim(number - round), false),
                (filled(number + round), false),
                (claim(number + round), false),
                (filled(number - round), true),
            ] {
                claims(&datapath).change(PLACES, |next| next.word = number);
                claims(&datapath).change(place(number), |claim| claim.word = before);
                tags(&datapath).change(place(number), |tag| tag.word = 0);
                copies.change(place(number), |copy| copy.len = 1);
                datapath.expect_unnoticed(program, &frame[from..]);
                let word = tags(&datapath).get(place(number)).word;
                let is_written = copies.get(place(number)).len != 1;
                assert_eq!((word != 0, is_written), (is_kept, is_kept), "{before:x}");
                let (hash, claim) = (hash_of(&frame), claims(&datapath).get(place(number)).word);
                match is_kept {
                    true => assert_eq!((word, claim), (tag(hash, number), filled(number))),
                    false => assert_eq!(claim, before),
                }
            }
        }
    }
}

/// Engines can write to them, and one may be hostile.
#[test]
fn nothing_in_the_tags_stops_the_store() {
    for (program, from) in INGRESS {
        for frame in [of_ipv4(LATER, MUCH), of_ipv6(LATER6, MUCH)] {
            let datapath = loaded!();
            for number in 0..u64::from(2 * PLACES) {
                let far = number + (1 << 30);
                let written = [claim(number), claim(far), tag(3, far), taken(far), u64::MAX];
                let word = written[number as usize % written.len()];
                tags(&datapath).change(place(number), |tag| tag.word = word);
                datapath.expect_unnoticed(program, &frame[from..]);
                let kept = tags(&datapath).get(place(number)).word;
                assert_eq!(kept, tag(hash_of(&frame), number), "{program} {word:x}");
            }
        }
    }
}

/// The engine compares the links of a datagram's fragments.
#[test]
fn a_fragment_of_the_world_comes_with_its_link() {
    for (program, from) in INGRESS {
        for fragments in [
            [of_ipv4(MORE, MUCH), of_ipv4(LATER, MUCH)],
            [
                of_ipv6(FIRST6, &Frame6::rx(Protocol::Udp).l4),
                of_ipv6(LATER6, MUCH),
            ],
        ] {
            let mut datapath = loaded!();
            match fragments[0][12] {
                0x08 => datapath.admit(Flow::new(Protocol::Udp)),
                _ => datapath.admit6(flow6(Protocol::Udp)),
            };
            for fragment in fragments {
                let run = datapath.run(program, &fragment[from..]);
                assert_eq!(run.action, REDIRECT);
                let (header, rest) = handed(&run.frame);
                assert_eq!(header.code, Handover::Fragment as u8);
                assert_eq!(rest[..2], link(TAP).to_be_bytes(), "{program}");
                assert_eq!(rest[2..], fragment[14..]);
            }
        }
    }
}

/// Frames on Ethernet have 60 bytes at least, and what is behind the packet is no part of it: nothing is
/// decided by that.
#[test]
fn a_first_fragment_ends_where_its_header_says() {
    for (program, from) in INGRESS {
        for (len, is_hit) in [(0, false), (8, true), (16, true)] {
            // Padding that looks like the flags of an acknowledgement, but for a whole header.
            let mut first = to_forward(Protocol::Tcp, Flags::ACK, MORE).bytes();
            let tcp = 14 + 20;
            if len == 16 {
                first[tcp + 13] = Flags::SYN;
            }
            set_total_len(&mut first, 20 + len);
            let mut datapath = loaded!();
            let host = to_forward(Protocol::Tcp, 0, MORE).destination;
            datapath.forward((host, 8_080, Protocol::Tcp), (VM, 80));
            match is_hit {
                true => assert_eq!(datapath.run(program, &first[from..]).action, REDIRECT),
                false => datapath.expect_unnoticed(program, &first[from..]),
            }
            let mut datapath = loaded!();
            datapath.admit(Flow::new(Protocol::Udp));
            let mut first = of_ipv4(MORE, MUCH);
            set_total_len(&mut first, 20 + len);
            match is_hit {
                true => assert_eq!(datapath.run(program, &first[from..]).action, REDIRECT),
                false => datapath.expect_unnoticed(program, &first[from..]),
            }
        }
    }
}

/// It has all headers (RFC 7112).
#[test]
fn a_first_fragment_of_ipv6_ends_where_its_header_says() {
    for (program, from) in INGRESS {
        for (len, is_hit) in [(0, false), (8, false), (16, false), (24, true)] {
            let l4 = l4_of(
                Protocol::Tcp,
                0,
                (443, 8_080),
                Flags::SYN,
                b"of the fragment",
            );
            let mut first = Frame6 {
                next_header: 44,
                l4: fragment_of(Protocol::Tcp as u8, FIRST6, 7, &l4),
                ..Frame6::rx(Protocol::Tcp)
            }
            .bytes();
            first[18..20].copy_from_slice(&(8 + len as u16).to_be_bytes());
            let mut datapath = loaded!();
            datapath.forward6((NAT6, 8_080, Protocol::Tcp), (VM, 80));
            match is_hit {
                true => assert_eq!(datapath.run(program, &first[from..]).action, REDIRECT),
                false => datapath.expect_unnoticed(program, &first[from..]),
            }
        }
    }
}

/// Makes the packet of a frame as long as this, bytes; what is behind it becomes padding.
fn set_total_len(frame: &mut [u8], len: u16) {
    frame[16..18].copy_from_slice(&len.to_be_bytes());
}

#[test]
fn a_fragment_that_is_too_long_or_lies_about_its_length_is_not_kept() {
    let room = MOST_L3_LEN - 20 - 8;
    for (program, from) in INGRESS {
        let datapath = loaded!();
        // The frame of a test has a UDP header in front of its payload.
        let longest = of_ipv4(LATER, &vec![1; room]);
        datapath.expect_unnoticed(program, &longest[from..]);
        assert_eq!(kept(&datapath), 1);
        let longer = of_ipv4(LATER, &vec![1; room + 1]);
        datapath.expect_unnoticed(program, &longer[from..]);
        let mut liar = of_ipv4(LATER, MUCH);
        liar[17] += 1;
        datapath.expect_unnoticed(program, &liar[from..]);
        assert_eq!(kept(&datapath), 1);
    }
}

/// Neither the host's, whose first one came, nor those of a guest's datagram, which are handed over.
#[test]
fn fragments_behind_their_first_one_are_not_kept() {
    for (program, from) in INGRESS {
        for (first, later) in [
            (of_ipv4(MORE, MUCH), of_ipv4(LATER, MUCH)),
            (
                of_ipv6(FIRST6, &Frame6::rx(Protocol::Udp).l4),
                of_ipv6(LATER6, MUCH),
            ),
        ] {
            let mut datapath = loaded!();
            datapath.expect_unnoticed(program, &first[from..]);
            datapath.expect_unnoticed(program, &later[from..]);
            assert_eq!(kept(&datapath), 0, "{program}: the host's");
            match first[12] {
                0x08 => datapath.admit(Flow::new(Protocol::Udp)),
                _ => datapath.admit6(flow6(Protocol::Udp)),
            };
            for frame in [&first, &later] {
                assert_eq!(datapath.run(program, &frame[from..]).action, REDIRECT);
            }
            assert_eq!(kept(&datapath), 0, "{program}: a guest's");
        }
    }
}

/// A fragment of a packet to port 8080 of the host, with these TCP flags.
fn to_forward(protocol: Protocol, tcp_flags: u8, fragment: u16) -> Frame {
    Frame {
        fragment,
        tcp_flags,
        destination_port: 8_080,
        payload: b"of the first fragment".to_vec(),
        ..Frame::rx(protocol)
    }
}

#[test]
fn fragments_of_a_first_packet_to_a_forward_go_to_its_vm() {
    let any = Ipv4Addr::UNSPECIFIED;
    for (program, from) in INGRESS {
        let host = to_forward(Protocol::Udp, 0, MORE).destination;
        for (host, port, protocol, flags, is_hit) in [
            (host, 8_080, Protocol::Udp, 0, true),
            (host, 8_080, Protocol::Tcp, Flags::SYN, true),
            (host, 8_080, Protocol::Tcp, Flags::ACK, false),
            (any, 8_080, Protocol::Udp, 0, true),
            (host, 8_081, Protocol::Udp, 0, false),
        ] {
            let mut datapath = loaded!();
            datapath.forward((host, port, protocol), (VM, 80));
            let later = to_forward(protocol, flags, LATER).bytes();
            let first = to_forward(protocol, flags, MORE).bytes();
            for frame in [&first, &later] {
                let frame = &frame[from..];
                if !is_hit {
                    datapath.expect_unnoticed(program, frame);
                    continue;
                }
                let run = datapath.run(program, frame);
                assert_eq!(run.action, REDIRECT, "{program} {protocol:?}");
                let (header, _) = handed(&run.frame);
                let flags = PortFlags::FROM_UPLINK | PortFlags::STRANGER;
                assert_eq!(
                    (header.code, header.flags),
                    (Handover::Fragment as u8, flags)
                );
            }
            assert_eq!(kept(&datapath), 0);
        }
    }
}

#[test]
fn fragments_of_a_first_ipv6_packet_to_a_forward_go_to_its_vm() {
    for (program, from) in INGRESS {
        for (protocol, flags, is_hit) in [
            (Protocol::Udp, 0, true),
            (Protocol::Tcp, Flags::SYN, true),
            (Protocol::Tcp, Flags::ACK, false),
        ] {
            let l4 = l4_of(protocol, 0, (443, 8_080), flags, b"of the first fragment");
            let frame = |field| Frame6 {
                next_header: 44,
                l4: fragment_of(protocol as u8, field, 7, &l4),
                ..Frame6::rx(protocol)
            };
            let mut datapath = loaded!();
            datapath.forward6((NAT6, 8_080, protocol), (VM, 80));
            for field in [FIRST6, LATER6] {
                let bytes = frame(field).bytes();
                if !is_hit {
                    datapath.expect_unnoticed(program, &bytes[from..]);
                    continue;
                }
                let run = datapath.run(program, &bytes[from..]);
                assert_eq!(run.action, REDIRECT, "{program} {protocol:?} {field}");
                let (header, _) = handed(&run.frame);
                let flags = PortFlags::FROM_UPLINK | PortFlags::STRANGER;
                assert_eq!(
                    (header.code, header.flags),
                    (Handover::Fragment as u8, flags)
                );
            }
        }
    }
}

/// Anybody may send them, so they leave half of the credits to the VM's peers.
#[test]
fn fragments_to_a_forward_use_half_of_the_worlds_credits() {
    let mut datapath = loaded!();
    let first = to_forward(Protocol::Udp, 0, MORE);
    datapath.forward((first.destination, 8_080, Protocol::Udp), (VM, 80));
    datapath.admit(Flow::new(Protocol::Udp));
    let credits = datapath.vms.get(ROW).world_credits;
    let mut handed_over = 0;
    while datapath.run("uplink_ingress", &first.bytes()).action == REDIRECT {
        handed_over += 1;
    }
    assert_eq!(handed_over, credits.div_ceil(2));
    let flows = of_ipv4(MORE, MUCH);
    assert_eq!(datapath.run("uplink_ingress", &flows).action, REDIRECT);
}

#[test]
fn a_frozen_vms_forward_drops_fragments() {
    let mut datapath = loaded!();
    let first = to_forward(Protocol::Udp, 0, MORE);
    datapath.forward((first.destination, 8_080, Protocol::Udp), (VM, 80));
    datapath.vms.change(ROW, |vm| vm.flags |= VmFlags::FROZEN);
    let run = datapath.run("uplink_ingress", &first.bytes());
    assert_eq!(run.action, SHOT);
    assert_eq!(datapath.only_reason(ROW), DropReason::Frozen);
}
