//! Time of a test run of each program, of two builds of the object in turn. A measurement: run it with
//! `SLIPGATE_BPF_BEFORE=OBJECT`, `--ignored` and `--nocapture`.
use std::{collections::BTreeMap, path::PathBuf};

use aya::{
    Ebpf, TestRun, TestRunOptions,
    maps::{HashMap, MapData},
    programs::SchedClassifier,
};
use slipgate_abi::{
    Addresses6, FlowRef, NextHop, Protocol, Slot, SlotRef, TapEntry, Tuple, Tuple6, Verdict, Vm,
    Vm6, maps::Owner, slot::SlotFlags,
};

use crate::{
    datapath::*,
    flow6::*,
    frame::*,
    frame6::*,
    mapped::Mapped,
    pool::{load_object, object},
};

const ROUNDS: usize = 21;
/// Runs on one frame: each sees what the one before left, so the hop limit ends them.
const RUNS: u32 = 200;
/// The ports of two flows that form a ring, as a flow's packet becomes one of the other's.
const RING: [(u16, u16); 2] = [(40_000, 40_777), (40_777, 40_000)];

/// An object with flows in its maps, whose guest's address is also the translated one.
struct Build {
    ebpf: Ebpf,
    slots: Mapped<Slot>,
}

impl Build {
    fn load(path: &std::path::Path) -> Self {
        let ebpf = load_object(path);
        let mut build = Self {
            slots: Mapped::of(&ebpf, "SLOTS"),
            ebpf,
        };
        Mapped::<Vm>::of(&build.ebpf, "VMS").set(
            ROW,
            Vm {
                credits: 1 << 30,
                world_credits: 1 << 30,
                ..vm()
            },
        );
        Mapped::<Owner>::of(&build.ebpf, "OWNERS").set(OWNER, owner());
        Mapped::<NextHop>::of(&build.ebpf, "NEXT_HOPS").set(HOP, next_hop());
        let entry = TapEntry {
            vm: VM,
            vm_row: ROW,
        };
        let taps = build.ebpf.map_mut("TAPS").unwrap();
        let mut taps = HashMap::<_, u32, TapEntry>::try_from(taps).unwrap();
        taps.insert(TAP, entry, 0).unwrap();
        for (at, protocol) in (0..).zip([Protocol::Tcp, Protocol::Udp]) {
            for (of_ring, ports) in (0..).zip(RING) {
                build.admit(8 + at * 2 + of_ring, protocol, ports);
            }
        }
        if build.ebpf.map("VMS6").is_some() {
            Mapped::<Vm6>::of(&build.ebpf, "VMS6").set(ROW, vm6());
            for (at, protocol) in (0..).zip([Protocol::Tcp, Protocol::Udp]) {
                for (of_ring, ports) in (0..).zip(RING) {
                    build.admit6(16 + at * 2 + of_ring, protocol, ports);
                }
            }
        }
        build
    }

    fn fill(&self, index: u32, protocol: Protocol, ports: (u16, u16), flags: u8) -> SlotRef {
        let flow = Flow {
            flags,
            nat: GUEST,
            guest_port: ports.0,
            nat_port: ports.1,
            verdict: Verdict::Fast,
            ..Flow::new(protocol)
        };
        self.slots.set(index, slot_of(&flow, 1, TAP));
        // SAFETY: the mapping lives as long as the build.
        unsafe { SlotRef::new(self.slots.at(index)) }
    }

    fn admit(&mut self, index: u32, protocol: Protocol, ports: (u16, u16)) {
        let slot = self.fill(index, protocol, ports, 0);
        let flows = self.ebpf.map_mut("FLOWS").unwrap();
        let mut flows: HashMap<&mut MapData, Tuple, FlowRef> = HashMap::try_from(flows).unwrap();
        let entry = FlowRef {
            slot: index,
            generation: 1,
        };
        flows.insert(slot.world_tuple(), entry, 1).unwrap();
        flows.insert(slot.guest_tuple(), entry, 1).unwrap();
    }

    fn admit6(&mut self, index: u32, protocol: Protocol, ports: (u16, u16)) {
        let slot = self.fill(index, protocol, ports, SlotFlags::IPV6);
        self.slots.change(index, |slot| {
            (slot.guest, slot.remote, slot.nat) = Default::default();
        });
        let addresses = Mapped::<Addresses6>::of(&self.ebpf, "ADDRESSES6");
        addresses.set(
            index,
            Addresses6 {
                guest: GUEST6.into(),
                remote: REMOTE6.into(),
                nat: GUEST6.into(),
                pad: [0; 16],
            },
        );
        // SAFETY: as above, until the end of this function.
        let addresses = unsafe { slipgate_abi::Addresses6Ref::new(addresses.at(index)) };
        let tuples = [addresses.world_tuple(slot), addresses.guest_tuple(slot)];
        let flows = self.ebpf.map_mut("FLOWS6").unwrap();
        let mut flows: HashMap<&mut MapData, Tuple6, FlowRef> = HashMap::try_from(flows).unwrap();
        let entry = FlowRef {
            slot: index,
            generation: 1,
        };
        for tuple in tuples {
            flows.insert(tuple, entry, 1).unwrap();
        }
    }

    /// Mean of the runs, ns. All must end as the first.
    fn measure(&self, program: &str, frame: &[u8], action: i32) -> u64 {
        let program: &SchedClassifier = self.ebpf.program(program).unwrap().try_into().unwrap();
        let options = TestRunOptions {
            data_in: Some(frame),
            repeat: RUNS,
            ..TestRunOptions::default()
        };
        let result = program.test_run(options).expect("test run");
        assert_eq!(result.return_value as i32, action);
        result.duration.as_nanos() as u64
    }
}

/// The measured runs: name, program, frame and how the run ends.
fn cases() -> Vec<(String, &'static str, Vec<u8>, i32)> {
    let mut arp = arp(1, GUEST, GATEWAY);
    arp.resize(60, 0);
    let mut cases = vec![
        // Neither of IPv4 nor of IPv6: what a run costs at least.
        (
            "4 uplink_ingress ARP".to_owned(),
            "uplink_ingress",
            arp.clone(),
            UNSPEC,
        ),
        ("4 guest_shut".to_owned(), "guest_shut", arp, SHOT),
    ];
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let name = protocol.name();
        let tx = Frame {
            ttl: 255,
            ..Frame::tx(protocol)
        };
        let rx = Frame {
            ttl: 255,
            destination: GUEST,
            destination_port: RING[0].1,
            ..Frame::rx(protocol)
        };
        let tx6 = Frame6 {
            hop_limit: 255,
            ..Frame6::tx(protocol)
        };
        let mut rx6 = Frame6 {
            hop_limit: 255,
            destination: GUEST6,
            ..Frame6::rx(protocol)
        };
        rx6.l4[2..4].copy_from_slice(&RING[0].1.to_be_bytes());
        cases.push((
            format!("4 guest_egress {name} hit"),
            "guest_egress",
            tx.bytes(),
            REDIRECT,
        ));
        cases.push((
            format!("4 uplink_ingress {name} hit"),
            "uplink_ingress",
            rx.bytes(),
            REDIRECT,
        ));
        cases.push((
            format!("6 guest_egress {name} hit"),
            "guest_egress",
            tx6.bytes(),
            REDIRECT,
        ));
        cases.push((
            format!("6 uplink_ingress {name} hit"),
            "uplink_ingress",
            rx6.bytes(),
            REDIRECT,
        ));
        if protocol == Protocol::Tcp {
            continue;
        }
        let (mut miss, mut world, mut miss6, mut world6) = (tx, rx, tx6, rx6);
        (miss.source_port, world.destination_port) = (9, 9);
        miss6.l4[..2].copy_from_slice(&[0, 9]);
        world6.l4[2..4].copy_from_slice(&[0, 9]);
        cases.push((
            "4 guest_egress miss".into(),
            "guest_egress",
            miss.bytes(),
            REDIRECT,
        ));
        cases.push((
            "4 uplink_ingress miss".into(),
            "uplink_ingress",
            world.bytes(),
            UNSPEC,
        ));
        cases.push((
            "6 guest_egress miss".into(),
            "guest_egress",
            miss6.bytes(),
            REDIRECT,
        ));
        cases.push((
            "6 uplink_ingress miss".into(),
            "uplink_ingress",
            world6.bytes(),
            UNSPEC,
        ));
    }
    cases
}

#[test]
#[ignore = "a measurement"]
fn ns_per_run_before_and_after() {
    let before = std::env::var_os("SLIPGATE_BPF_BEFORE").map(PathBuf::from);
    let before = Build::load(&before.expect("an object to compare with"));
    let after = Build::load(&object());
    let mut times = BTreeMap::<_, Vec<u64>>::new();
    for _ in 0..ROUNDS {
        for (name, program, frame, action) in cases() {
            let of_ipv4 = name.starts_with('4');
            for (which, build) in [
                ("0 before", &before),
                ("1 after", &after),
                ("2 before, again", &before),
            ] {
                if of_ipv4 || which == "1 after" {
                    let ns = build.measure(program, &frame, action);
                    times.entry((name.clone(), which)).or_default().push(ns);
                }
            }
        }
    }
    for ((name, which), mut times) in times {
        times.sort_unstable();
        let (median, last) = (times[times.len() / 2], times.len() - 1);
        println!(
            "{name}, {which}: {median} ns ({} to {})",
            times[last / 10],
            times[last * 9 / 10]
        );
    }
}
