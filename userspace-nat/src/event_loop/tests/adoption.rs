//! The adoption of a predecessor's flows goes on while the engine serves.
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;
use slipgate_abi::{FlowRef, Ip4, Protocol, Refusal, Slot, Tuple, Verdict, VmId, VmRow};
use slipgate_model::{OnExit, Subject};
use slipgate_policy::{Action, Rule};

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    control::Cut,
    flow::{EndReason, State},
    state::Nat,
};

fn roomy() -> Setup {
    Setup {
        slots: 32_768,
        max_flows: 32_768,
        rate: 32_768,
        ..Setup::default()
    }
}

/// A successor that adopts `slots_per_turn` slots in a turn of the crowd's flows.
fn under_way(slots_per_turn: usize) -> Rig {
    let mut rig = Rig::crowded(|_| PEER).restart_in_steps(&roomy());
    rig.engine.adopting.slots_per_turn = slots_per_turn;
    rig
}

impl Rig {
    fn left(&self) -> usize {
        self.engine.core.nat.flows.left_in_all()
    }

    fn finish(&mut self) {
        self.engine.finish_adoption().unwrap();
        assert_eq!(self.left(), 0);
        self.assert_paired();
    }
}

/// Returns how many flows were recorded, by the reason of their end.
fn ends(rig: &Rig) -> BTreeMap<String, usize> {
    let mut ends = BTreeMap::new();
    for record in rig.records() {
        let end = record["end"].as_str().unwrap();
        *ends.entry(end.to_owned()).or_default() += 1;
    }
    ends
}

#[test]
fn a_new_flow_is_admitted_before_the_predecessors_are_adopted() {
    let mut rig = under_way(64);
    assert_eq!(rig.flows(), usize::from(CROWD), "all count from the start");
    let looked_at = rig.kernel.borrow().slots_looked_at.get();
    rig.connect_from(2, 40_000, 7);
    let looks = rig.kernel.borrow().slots_looked_at.get() - looked_at;
    assert!(looks < 5_000, "{looks} slots for one flow");
    assert!(rig.left() > usize::from(CROWD) * 9 / 10);
    assert_eq!(
        rig.engine.timeout_ns(),
        Some(0),
        "it goes on without a frame"
    );
    while rig.engine.core.nat.flows.is_adopting() {
        rig.turn();
    }
    rig.finish();
    assert_eq!(rig.flows(), usize::from(CROWD) + 1);
    assert_eq!(rig.engine.core.nat.flows.adoption.live, usize::from(CROWD));
    rig.pass(3 * 3_600 * SECOND_NS);
    rig.assert_empty();
    assert_eq!(rig.records().len(), usize::from(CROWD) + 1);
}

#[test]
fn a_packet_of_a_flow_that_is_left_belongs_to_it() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    let mut rig = rig.restart_in_steps(&Setup::default());
    rig.engine.adopting.slots_per_turn = 0;
    let slot = rig.kernel.borrow().slots_in_use()[0];
    // The SYN again comes to the engine, which must not take it for another flow's.
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    let entry = *rig.engine.core.nat.flows.entry(slot).unwrap();
    assert_eq!((entry.nat_port, entry.state), (nat.1, State::Live));
    assert_eq!(rig.flows(), 1);
    // A SYN with another number is another flow's: the old one ends once.
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 8_000));
    rig.engine.adopting.slots_per_turn = 256;
    rig.finish();
    rig.pass(SECOND_NS);
    let records = rig.records();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0]["end"], "tuple-reused");
    assert_eq!(rig.flows(), 1);
}

#[test]
fn a_flow_that_is_left_keeps_its_port() {
    let ports = || Setup {
        nat_ports: 61_000..=61_015,
        ..Setup::default()
    };
    let mut rig = Rig::with(ports());
    let before: Vec<At> = (0..8).map(|i| rig.connect(40_000 + i, 7)).collect();
    let mut rig = rig.restart_in_steps(&ports());
    rig.engine.adopting.slots_per_turn = 0;
    for i in 0..4 {
        let nat = rig.connect(50_000 + i, 7);
        assert!(!before.contains(&nat));
    }
    let slot = rig.kernel.borrow().slots_in_use()[0];
    rig.engine.adopting.slots_per_turn = 256;
    rig.finish();
    let flows = &rig.engine.core.nat.flows;
    let to = flows.entry(slot).unwrap().destination();
    assert_eq!(flows.ports.busy(&to), 12);
    rig.pass(3 * 3_600 * SECOND_NS);
    rig.assert_empty();
    assert_eq!(rig.records().len(), 12);
}

#[test]
fn what_is_left_counts_against_the_cap_and_gives_way() {
    let capped = || Setup {
        max_flows: 8,
        ..Setup::default()
    };
    let mut rig = Rig::with(capped());
    for port in 0..8 {
        rig.connect(40_000 + port, 7);
    }
    let mut rig = rig.restart_in_steps(&capped());
    rig.engine.adopting.slots_per_turn = 0;
    rig.guest(1, &syn((GUEST, 50_000), SERVER, 7));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 1);
    assert_eq!(rig.flows(), 8);
    // Flows that nobody answered give way, though the walk has not come to them.
    let mut rig = Rig::with(capped());
    for port in 0..8 {
        rig.guest(1, &udp((GUEST, 40_000 + port), SERVER, b"x"));
    }
    rig.kernel.borrow_mut().now_ns += 40 * SECOND_NS;
    let mut rig = rig.restart_in_steps(&capped());
    rig.engine.adopting.slots_per_turn = 0;
    rig.guest(1, &udp((GUEST, 50_000), SERVER, b"x"));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 0);
}

#[test]
fn commands_find_the_flows_that_are_left() {
    let mut rig = Rig::new();
    for port in 0..4 {
        rig.connect_from(1, 40_000 + port, 7);
        rig.connect_from(2, 40_000 + port, 7);
    }
    let mut rig = rig.restart_in_steps(&Setup::default());
    rig.engine.adopting.slots_per_turn = 0;
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let generation = rig.kernel.borrow().slot(slot).generation().load(Relaxed);
    let row = rig.kernel.borrow().slot(slot).row();
    let flow = Subject::Flow { slot, generation };
    let Cut { flows, .. } = rig.tell(move |engine| engine.cut(flow)).unwrap();
    assert_eq!((flows, rig.left()), (1, 7));
    let other = Subject::Vm {
        row: VmRow::new(3 - row.get()),
    };
    let Cut { flows, .. } = rig.tell(move |engine| engine.cut(other)).unwrap();
    assert_eq!((flows, rig.left()), (4, 3));
    let id = VmId::new(100 + row.word());
    rig.send(move |engine| engine.remove_vm(row, id));
    rig.turn();
    assert_eq!(rig.left(), 0);
    rig.engine.adopting.slots_per_turn = 256;
    rig.finish();
    rig.pass(SECOND_NS);
    rig.assert_empty();
    assert_eq!(
        ends(&rig),
        BTreeMap::from([("cut".into(), 5), ("vm-removed".into(), 3)])
    );
}

#[test]
fn a_successor_that_dies_half_way_has_one_that_adopts_the_rest() {
    let denied = Ip4 {
        octets: [203, 0, 113, 9],
    };
    let rig = Rig::crowded(|i| if i % 2 == 0 { denied } else { PEER });
    let deny = || Setup {
        rules: vec![Rule::Match(
            Action::Deny,
            "203.0.113.0/24:1-65535/udp".parse().unwrap(),
        )],
        ..roomy()
    };
    let mut rig = rig.restart_in_steps(&deny());
    rig.engine.adopting.slots_per_turn = 100;
    for _ in 0..20 {
        rig.turn();
        rig.kernel.borrow_mut().now_ns += 30 * MILLISECOND_NS;
    }
    rig.connect_from(2, 40_000, 7);
    assert!(rig.left() > 5_000);
    let recorded = rig.records().len();
    assert!(recorded > 0 && recorded < usize::from(CROWD) / 2);
    let mut rig = rig.restart_in_steps(&deny());
    rig.engine.adopting.slots_per_turn = 100;
    rig.turn();
    rig.finish();
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), usize::from(CROWD) / 2 + 1);
    let records = rig.records();
    assert_eq!(records.len(), usize::from(CROWD) / 2, "each once");
    assert!(
        records
            .iter()
            .all(|record| record["remote"].as_str().unwrap().starts_with("203."))
    );
    rig.pass(3 * 3_600 * SECOND_NS);
    rig.assert_empty();
    assert_eq!(rig.records().len(), usize::from(CROWD) + 1);
}

#[test]
fn a_new_flow_takes_what_half_a_pair_left_free() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let guest = rig.kernel.borrow().slot(slot).guest_tuple();
    rig.kernel.borrow_mut().flows.remove(&guest);
    let mut rig = rig.restart_in_steps(&Setup::default());
    rig.engine.adopting.slots_per_turn = 0;
    let new = rig.connect(40_000, 9);
    assert_ne!(new, nat);
    rig.engine.adopting.slots_per_turn = 256;
    rig.finish();
    assert_eq!(rig.world(&ack(SERVER, new, 0, 9_001, 10)), Handling::Fast);
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 1);
    assert_eq!(rig.records()[0]["end"], "adopted");
}

#[test]
fn an_error_of_the_kernel_during_the_sweep_ends_the_engine() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let generation = rig.kernel.borrow().slot(slot).generation().load(Relaxed);
    let dangling = Tuple {
        scope: Tuple::WORLD,
        local_port: 9,
        ..rig.kernel.borrow().slot(slot).world_tuple()
    };
    let flow = FlowRef::new(slot, generation);
    rig.kernel.borrow_mut().flows.insert(dangling, flow);
    let mut rig = rig.restart_in_steps(&Setup::default());
    rig.kernel.borrow_mut().faults.remove_fails = 1;
    assert!(rig.engine.finish_adoption().is_err());
    let mut rig = rig.restart_in_steps(&Setup::default());
    assert_eq!(rig.engine.finish_adoption().unwrap().dangling, 1);
    rig.finish();
}

#[test]
fn a_stop_during_the_adoption_leaves_no_tuple() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let generation = rig.kernel.borrow().slot(slot).generation().load(Relaxed);
    let dangling = Tuple {
        scope: Tuple::WORLD,
        local_port: 9,
        ..rig.kernel.borrow().slot(slot).world_tuple()
    };
    let flow = FlowRef::new(slot, generation);
    rig.kernel.borrow_mut().flows.insert(dangling, flow);
    let mut rig = rig.restart_in_steps(&Setup::default());
    rig.engine.adopting.slots_per_turn = 0;
    rig.send(|engine| {
        engine.adopting.slots_per_turn = 1;
        engine.stop(OnExit::Detach);
    });
    assert_eq!(rig.run().unwrap(), OnExit::Detach);
    assert!(rig.kernel.borrow().flows.is_empty());
}

/// Ways in which a process that died can have left a flow half made or half removed.
#[derive(Clone, Copy, Debug)]
enum Damage {
    None,
    Closing,
    Lacks { guest: bool, world: bool },
    ClosingLacks { guest: bool, world: bool },
    Freed,
    Denied,
}

fn damage() -> impl Strategy<Value = Damage> {
    let pair = (any::<bool>(), any::<bool>());
    prop_oneof![
        4 => Just(Damage::None),
        2 => Just(Damage::Denied),
        1 => Just(Damage::Closing),
        1 => pair.prop_map(|(guest, world)| Damage::Lacks { guest, world }),
        1 => pair.prop_map(|(guest, world)| Damage::ClosingLacks { guest, world }),
        1 => Just(Damage::Freed),
    ]
}

const DENIED: At = (
    Ip4 {
        octets: [203, 0, 113, 9],
    },
    443,
);

fn deny() -> Setup {
    Setup {
        rules: vec![Rule::Match(
            Action::Deny,
            "203.0.113.0/24:443/tcp".parse().unwrap(),
        )],
        ..Setup::default()
    }
}

/// A table that a process left, one flow for each damage.
fn left_by_the_dead(flows: &[(u16, Damage)]) -> Rig {
    let mut rig = Rig::new();
    for (i, (row, damage)) in flows.iter().enumerate() {
        let to = if matches!(damage, Damage::Denied) {
            DENIED
        } else {
            SERVER
        };
        let before = rig.kernel.borrow().slots_in_use();
        rig.guest(*row, &syn((GUEST, 40_000 + i as u16), to, 7));
        let mut kernel = rig.kernel.borrow_mut();
        let slot = *kernel
            .slots_in_use()
            .iter()
            .find(|slot| !before.contains(slot))
            .unwrap();
        let live = kernel.slot(slot);
        let lacks = match damage {
            Damage::Lacks { guest, world } | Damage::ClosingLacks { guest, world } => {
                (*guest, *world)
            }
            _ => (false, false),
        };
        if matches!(damage, Damage::Closing | Damage::ClosingLacks { .. }) {
            live.set_verdict(Verdict::Closing);
        }
        if matches!(damage, Damage::Freed) {
            live.set_verdict(Verdict::Free);
        }
        let (guest, world) = (live.guest_tuple(), live.world_tuple());
        if lacks.0 {
            kernel.flows.remove(&guest);
        }
        if lacks.1 {
            kernel.flows.remove(&world);
        }
    }
    rig
}

/// The state after an adoption, without what is drawn at random.
fn state(rig: &Rig) -> impl PartialEq + std::fmt::Debug + use<> {
    let kernel = rig.kernel.borrow();
    let flows = &rig.engine.core.nat.flows;
    let guest_of = |slot| (kernel.slot(slot).row(), kernel.slot(slot).guest_port());
    let entries: BTreeMap<_, _> = flows
        .all()
        .into_iter()
        .map(|slot| {
            let entry = flows.entry(slot).unwrap();
            let verdict = kernel.slot(slot).verdict().load(Relaxed);
            let busy = entry.destination();
            (
                guest_of(slot),
                (
                    format!("{:?}", entry.state),
                    verdict,
                    flows.ports.busy(&busy),
                ),
            )
        })
        .collect();
    let mut tuples: HashMap<_, usize> = HashMap::new();
    for (tuple, flow) in &kernel.flows {
        *tuples
            .entry((guest_of(flow.index()), tuple.scope))
            .or_default() += 1;
    }
    let counts: Vec<_> = (1..=3).map(|row| flows.count(VmRow::new(row))).collect();
    (entries, tuples, counts, flows.adoption, flows.len())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a process left, and whichever of its flows packets concern meanwhile, an adoption
    /// in steps ends as one at once does.
    #[test]
    fn in_steps_as_at_once(
        flows in prop::collection::vec((1u16..=3, damage()), 0..40),
        steps in 1usize..5,
        packets in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut whole = left_by_the_dead(&flows).restart_in_steps(&deny());
        whole.engine.finish_adoption().unwrap();
        let mut rig = left_by_the_dead(&flows).restart_in_steps(&deny());
        rig.engine.adopting.slots_per_turn = steps;
        for packet in packets {
            if flows.is_empty() {
                break;
            }
            let tuple = {
                let kernel = rig.kernel.borrow();
                let in_use = kernel.slots_in_use();
                (!in_use.is_empty()).then(|| kernel.guest_tuple(*packet.get(&in_use)))
            };
            if let Some(tuple) = tuple {
                let now_ns = rig.kernel.borrow().now_ns;
                rig.engine.core.adopt_by(&tuple, now_ns);
            }
            rig.engine.go_on_adopting().unwrap();
        }
        rig.engine.finish_adoption().unwrap();
        prop_assert_eq!(state(&rig), state(&whole));
        rig.pass(SECOND_NS);
        whole.pass(SECOND_NS);
        prop_assert_eq!(ends(&rig), ends(&whole));
        rig.assert_paired();
    }
}

#[test]
fn orphans_are_recorded_once_with_what_they_had_counted() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let datagrams = [5_000, 5_001].map(|port| udp((GUEST, port), (PEER, 9), b"counted"));
    for packet in &datagrams {
        rig.guest(1, packet);
    }
    rig.at_world();
    let slots = rig.kernel.borrow().slots_in_use();
    assert_eq!(slots.len(), 3);
    // The engine was about to end one of them.
    let now_ns = rig.kernel.borrow().now_ns;
    let Nat {
        flows, datapath, ..
    } = &mut rig.engine.core.nat;
    flows.begin_end(datapath, slots[2], EndReason::Idle, now_ns);
    // What would refuse them is not looked at.
    let mut rig = rig.restart_in_steps(&Setup {
        default: Action::Deny,
        ..Setup::default()
    });
    // They are in the memory of the process that has died.
    rig.kernel.borrow_mut().flows.clear();
    rig.engine.end_orphans();
    rig.assert_empty();
    assert_eq!(
        ends(&rig),
        BTreeMap::from([("engine-died".into(), 2), ("adopted".into(), 1)])
    );
    let bytes = |record: &serde_json::Value| record["tx_bytes"].as_u64().unwrap();
    let records = rig.records();
    let udp_records = records.iter().filter(|record| record["proto"] == "udp");
    assert!(udp_records.map(bytes).all(|bytes| bytes == 20 + 8 + 7));
}

/// Whoever took an engine over may have given its memory to a process that goes on writing to it.
#[test]
fn an_orphan_that_changes_meanwhile_is_recorded_as_it_was_at_one_look() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), (PEER, 9), b"counted"));
    rig.at_world();
    rig.kernel.borrow_mut().flows.clear();
    let mut rig = rig.restart_in_steps(&Setup::default());
    rig.kernel.borrow_mut().at_look = Some(|slot| {
        // SAFETY: the handle is valid, and nobody else changes the slot meanwhile.
        unsafe {
            let at = slot.as_ptr();
            (*at).guest.octets[3] += 1;
            (*at).guest_port += 1;
        }
    });
    rig.engine.end_orphans();
    rig.kernel.borrow_mut().at_look = None;
    let records = rig.records();
    assert_eq!(records.len(), 1, "{records:#?}");
    let guest = records[0]["guest"].as_str().unwrap();
    let [address, port] = guest.split(':').collect::<Vec<_>>()[..] else {
        panic!("{guest}");
    };
    let by: u16 = address.rsplit('.').next().unwrap().parse().unwrap();
    assert_eq!(by - 15, port.parse::<u16>().unwrap() - 5_000, "{guest}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// An engine that was taken over may have left anything in its slots.
    #[test]
    fn a_slot_that_lies_harms_no_records_of_other_orphans(
        (vm_row, vm, nat_port, flags) in any::<(u16, u32, u16, u8)>(),
        (verdict, rule, epoch, tcp) in any::<(u32, u32, u32, u32)>(),
        numbers in any::<[u64; 6]>(),
    ) {
        let mut rig = Rig::new();
        for port in 5_000..5_003 {
            rig.guest(1, &udp((GUEST, port), (PEER, 9), b"counted"));
        }
        rig.at_world();
        let liar = rig.kernel.borrow().slots_in_use()[1];
        {
            let mut kernel = rig.kernel.borrow_mut();
            let [tx_packets, tx_bytes, rx_packets, rx_bytes, tx_last_ns, created_ns] = numbers;
            let slot = Slot {
                generation: kernel.slot(liar).generation().load(Relaxed),
                verdict: Verdict::Fast,
                tcp,
                next_hop: rule,
                tx_packets,
                tx_bytes,
                rx_packets,
                rx_bytes,
                tx_last_ns,
                rx_last_ns: tx_last_ns,
                vm,
                vm_row,
                owner: vm_row,
                guest: PEER,
                remote: GUEST,
                nat: PEER,
                guest_port: nat_port,
                remote_port: 0,
                nat_port,
                protocol: Protocol::Icmp,
                flags,
                isn: tcp,
                created_ns,
                rule,
                uplink_ifindex: rule,
                epoch,
                fin_end_tx: tcp,
                fin_end_rx: tcp,
                connect_us: tcp,
            };
            kernel.set_slot(liar, slot);
            kernel.slot(liar).verdict().store(verdict, Relaxed);
            kernel.flows.clear();
        }
        let mut rig = rig.restart_in_steps(&Setup::default());
        rig.engine.end_orphans();
        let records = rig.records();
        let honest = |port: u16| {
            let guest = format!("10.0.2.15:{port}");
            records.iter().filter(|record| record["guest"] == guest.as_str()).count()
        };
        prop_assert_eq!((honest(5_000), honest(5_002)), (1, 1), "{:?}", records);
    }
}
