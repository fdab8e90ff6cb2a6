//! User mode on a host that has no socket for another flow.
use std::rc::Rc;

use slipgate_abi::{Protocol, Refusal, VmRow, tcp::Flags};
use slipgate_policy::Destination;

use super::rig::*;
use crate::host_sockets::{Busy, HostSockets, KEPT};

#[test]
fn without_a_socket_the_new_is_refused_why_says_so_and_the_live_and_the_next_go_on() {
    let mut rig = Rig::new();
    let udp_of = |port| udp((GUEST, port), SERVER, b"hello");
    rig.guest(1, &udp_of(5_000));
    assert_eq!(rig.at_world().len(), 1, "with sockets");
    // None are left but those that are kept for other things.
    rig.engine.core.nat.host_sockets = Some(Rc::new(HostSockets::new(KEPT)));
    rig.guest(1, &syn((GUEST, 5_001), SERVER, 1));
    let (_, reset) = rig.at_guest().pop().expect("an RST");
    assert_eq!(reset[33], Flags::RST | Flags::ACK);
    rig.guest(1, &udp_of(5_002));
    let (_, unreachable) = rig.at_guest().pop().expect("an ICMP error");
    assert_eq!(unreachable[20], 3);
    assert_eq!(rig.refused(1, Refusal::NoSocket), 2);
    let to = Destination {
        addr: SERVER.0.into(),
        port: SERVER.1,
        protocol: Protocol::Tcp,
    };
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
    assert_eq!(why.refusal.as_deref(), Some("no_socket"));
    assert!(why.outcome.contains("descriptors"), "{}", why.outcome);
    // The live one has its own.
    assert!(rig.at_world().is_empty());
    rig.guest(1, &udp_of(5_000));
    assert_eq!(rig.at_world().len(), 1);
    // There are some again.
    rig.engine.core.nat.host_sockets = Some(Rc::new(HostSockets::new(1 << 20)));
    rig.guest(1, &udp_of(5_002));
    assert_eq!(rig.at_world().len(), 1);
    assert_eq!(rig.refused(1, Refusal::NoSocket), 2);
}

#[test]
fn a_flow_whose_port_the_host_refuses_leaves_nothing_behind() {
    let mut rig = Rig::new();
    let host = Rc::new(HostSockets::new(1 << 20));
    host.refuses.set(Some(Busy::Bound));
    rig.engine.core.nat.host_sockets = Some(host);
    rig.guest(1, &syn((GUEST, 5_001), SERVER, 1));
    let (_, reset) = rig.at_guest().pop().expect("an RST");
    assert_eq!(reset[33], Flags::RST | Flags::ACK);
    assert_eq!((rig.flows(), rig.at_world().len()), (0, 0));
    assert_eq!(rig.kernel.borrow().flows.len(), 0);
    // The next frame is no order to open it.
    let nat = &mut rig.engine.core.nat;
    assert!(nat.flows.take_ordered(&nat.datapath).is_none());
}
