//! One description, two kernels: random frames over random tables, given to the BPF programs by
//! `BPF_PROG_TEST_RUN` and to the in-memory kernel of the engine's tests. Both are
//! `slipgate_abi::datapath`, compiled by two compilers for two machines, over maps and helpers of
//! which one set is ours. They must agree on where each frame goes, byte for byte, and on all that
//! is counted and noted.
//!
//! A test run has full checksums only; partial ones go over TAPs, in `ebpf/control/tests/programs`.

mod both;
mod choices;
mod choices6;

use std::collections::BTreeMap;

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use slipgate_abi::{DropReason, Handover, Protocol};
use slipgate_testbed::{NetNs, require_root_and_tun};
use userspace_nat::fake::Handling;

use crate::both::Both;

/// Frames that are sent over the same tables, one after another.
const FRAMES: usize = 4;
/// The largest of a TAP.
const OTHER_MTU: u32 = 65_521;
const TAPE: usize = 520;
const CASES: u32 = 6_000;

/// Handovers, each of which the frames of a run must reach. Those that need a refusal by the
/// kernel, or a TAP that has lost its program, are left out.
const HANDOVERS: [Handover; 15] = [
    Handover::Miss,
    Handover::Syn,
    Handover::Verdict,
    Handover::TtlExpired,
    Handover::TooBig,
    Handover::Arp,
    Handover::Dhcp,
    Handover::Local,
    Handover::Icmp,
    Handover::Forward,
    Handover::Asleep,
    Handover::Fragment,
    Handover::Ndp,
    Handover::Address,
    Handover::Challenge,
];
const DROPS: [DropReason; 25] = [
    DropReason::Tagged,
    DropReason::Spoofed,
    DropReason::Malformed,
    DropReason::Ipv6,
    DropReason::Fragment,
    DropReason::IpOptions,
    DropReason::EtherType,
    DropReason::IpProtocol,
    DropReason::GsoBomb,
    DropReason::NoCredit,
    DropReason::Denied,
    DropReason::Frozen,
    DropReason::Group,
    DropReason::TooBig,
    DropReason::TtlExpired,
    DropReason::NoFlow,
    DropReason::BadCommand,
    DropReason::StaleVm,
    DropReason::BadTcpFlags,
    DropReason::OutOfWindow,
    DropReason::PacketRate,
    DropReason::ByteRate,
    DropReason::EngineBusy,
    DropReason::ExtensionHeader,
    DropReason::RouterAdvertisement,
];

#[test]
fn the_programs_and_the_in_memory_kernel_agree() {
    require_root_and_tun!();
    let ns = NetNs::new("datapath").expect("a namespace");
    // No frame is as large as either's MTU.
    for change in [
        "tuntap add other mode tap".to_owned(),
        format!("link set other mtu {OTHER_MTU} up"),
    ] {
        ns.ip(&change).expect("a device");
    }
    let other_uplink = ns.ifindex("other").expect("its index");
    ns.run(|| {
        let both = Both::new(other_uplink);
        let mut reached = BTreeMap::<String, u32>::new();
        let mut runner = TestRunner::new(Config {
            cases: CASES,
            failure_persistence: None,
            ..Config::default()
        });
        let tape = prop::collection::vec(any::<u8>(), 0..TAPE);
        let reached_by = std::cell::RefCell::new(&mut reached);
        let done = runner.run(&tape, |tape| {
            let mut choices = choices::Choices::new(&tape);
            both.forget_drops();
            let protocol = choices::fill(&both, &mut choices);
            for _ in 0..FRAMES {
                let is_ipv6 = choices.once_in(2);
                let (at, frame, gso_size) = match (is_ipv6, protocol) {
                    (false, _) => choices::frame(protocol, &mut choices),
                    (true, Protocol::Icmp) => choices6::frame(Protocol::Icmpv6, &mut choices),
                    (true, _) => choices6::frame(protocol, &mut choices),
                };
                let ([real, memory], way) = both.send(at, &frame, gso_size);
                prop_assert_eq!(
                    &real,
                    &memory,
                    "{:?} {:?} gso {} {:02x?}",
                    way,
                    at,
                    gso_size,
                    frame
                );
                let [real, memory] = both.counted();
                prop_assert_eq!(
                    &real,
                    &memory,
                    "{:?} {:?} gso {} {:02x?}",
                    way,
                    at,
                    gso_size,
                    frame
                );
                let key = match way {
                    Handling::Fast | Handling::Passed if is_ipv6 => format!("{at:?} {way:?} 6"),
                    Handling::Fast | Handling::Passed => format!("{at:?} {way:?}"),
                    Handling::Engine(_) | Handling::Dropped(_) | Handling::Discarded => {
                        format!("{way:?}")
                    }
                };
                *reached_by.borrow_mut().entry(key).or_default() += 1;
            }
            Ok(())
        });
        done.unwrap_or_else(|failed| panic!("{failed}"));
        println!("{reached:#?}");
        let ways = HANDOVERS.map(Handling::Engine).into_iter();
        let ways = ways.chain(DROPS.map(Handling::Dropped));
        let missed: Vec<_> = ways
            .map(|way| format!("{way:?}"))
            .chain(
                [
                    "Guest Fast",
                    "Uplink Fast",
                    "UplinkWithoutL2 Fast",
                    "EnginePort Fast",
                    "Guest Fast 6",
                    "Uplink Fast 6",
                    "UplinkWithoutL2 Fast 6",
                    "EnginePort Fast 6",
                    "Discarded",
                ]
                .map(Into::into),
            )
            .filter(|way| !reached.contains_key(way))
            .collect();
        assert!(missed.is_empty(), "no frame came to {missed:?}");
    });
}
