//! Where a rule of the host is by what the engine does not look at, the kernel decides.
use std::{cell::RefCell, collections::HashMap, rc::Rc};

use slipgate_abi::{IfIndex, Protocol, Refusal, VmId};
use slipgate_model::{
    NetworkView, RouteKind, VmSpec,
    route::{
        RouteDomain, RouteStep, StepAction,
        ask::{Answer, AskKernel, Question, Transport},
    },
};
use slipgate_policy::EgressRoutes;

use super::{follow::with_table, rig::*};
use crate::{
    clock::SECOND_NS,
    datapath::Tables as _,
    dns::Ways as _,
    event_loop::{QUESTION_WORK, WORK_PER_TURN},
    flow::STEPS_PER_TURN,
    port::VirtioNetHdr,
    state::follow::STEPS_PER_QUESTION,
};

const HOST: EgressRoutes = EgressRoutes::Host { mark: 0 };
const SECOND: IfIndex = IfIndex::new(77);

/// A kernel with a rule for each source port, which remembers what it was asked.
#[derive(Clone, Debug, Default)]
struct Kernel(Rc<RefCell<Rules>>);

#[derive(Debug, Default)]
struct Rules {
    answers: HashMap<u16, Answer>,
    asked: Vec<Question>,
}

impl AskKernel for Kernel {
    fn ask(&self, question: &Question) -> Option<Answer> {
        let rules = &mut *self.0.borrow_mut();
        rules.asked.push(*question);
        rules.answers.get(&question.transport.from_port).copied()
    }
}

impl Kernel {
    fn set(&self, port: u16, answer: Answer) {
        self.0.borrow_mut().answers.insert(port, answer);
    }

    fn asked(&self) -> Vec<Question> {
        std::mem::take(&mut self.0.borrow_mut().asked)
    }
}

/// A host with a second uplink, to which only the table 100 leads. `rules`: their digest.
fn undecided(rules: u64) -> NetworkView {
    let mut network = with_table();
    let action = StepAction::Undecided { priority: 9, rules };
    network.routes.further.domains.push(RouteDomain {
        routes: HOST,
        ipv4: vec![
            RouteStep::all(action),
            RouteStep::all(StepAction::AnyOfMain),
        ],
        ipv6: Vec::new(),
    });
    network
}

/// A VM with the host's routes, and the kernel that is asked about them.
fn rig() -> (Rig, Kernel) {
    let mut rig = Rig::new();
    rig.follow(undecided(1));
    let kernel = Kernel::default();
    let asked = Box::new(kernel.clone());
    let vm = VmSpec {
        routes: Some(HOST),
        ..spec(1, &Setup::default())
    };
    rig.tell(|engine| {
        engine.set_route_kernel(asked);
        engine.set_vm(vm);
    });
    (rig, kernel)
}

fn uplinks(rig: &Rig) -> Vec<IfIndex> {
    let nat = &rig.engine.core.nat;
    let slots = nat.flows.all();
    let live = slots.into_iter().filter(|slot| !nat.flows.is_cut(*slot));
    live.map(|slot| nat.datapath.slot(slot).uplink()).collect()
}

#[test]
fn the_kernel_is_asked_about_the_flow_and_its_table_is_taken() {
    let (mut rig, kernel) = rig();
    kernel.set(40_001, Answer::Table(254));
    kernel.set(40_002, Answer::Table(100));
    rig.connect_from(1, 40_001, 1);
    assert_eq!(uplinks(&rig), [UPLINK]);
    let asked = kernel.asked();
    assert_eq!(asked.len(), 1, "once: {asked:?}");
    let Question {
        mark,
        to,
        from,
        transport,
    } = asked[0];
    assert_eq!((mark, to, from), (0, PEER.into(), None));
    let ports = (transport.from_port, transport.to_port);
    assert_eq!(
        (transport.protocol, ports),
        (Some(Protocol::Tcp), (40_001, 443))
    );
    rig.kernel.borrow_mut().uplink = SECOND.get();
    rig.connect_from(1, 40_002, 1);
    let mut by = uplinks(&rig);
    by.sort_unstable();
    assert_eq!(by, [UPLINK, SECOND]);
}

#[test]
fn what_the_kernel_refuses_or_does_not_say_is_refused() {
    let (mut rig, kernel) = rig();
    kernel.set(40_001, Answer::Refused(RouteKind::Prohibit));
    kernel.set(40_002, Answer::NoRoute);
    kernel.set(40_003, Answer::Table(300));
    for (refused, port) in (1..).zip(40_001..=40_004) {
        rig.guest(1, &syn((GUEST, port), (PEER, 443), 1));
        assert_eq!(rig.refused(1, Refusal::NoRoute), refused, "{port}");
    }
    assert_eq!(rig.flows(), 0);
}

#[test]
fn live_flows_are_asked_about_anew_when_the_rules_change() {
    let (mut rig, kernel) = rig();
    for port in [40_001, 40_002, 40_003] {
        kernel.set(port, Answer::Table(254));
        rig.connect_from(1, port, 1);
    }
    kernel.asked();
    // Nothing that concerns them has changed.
    rig.follow(undecided(1));
    rig.pass(SECOND_NS);
    assert_eq!(kernel.asked(), []);
    // By the other link a flow has another address; where there is no answer, it goes on.
    kernel.set(40_001, Answer::Table(100));
    kernel.set(40_002, Answer::Table(300));
    rig.follow(undecided(2));
    rig.pass(SECOND_NS);
    assert_eq!(kernel.asked().len(), 3);
    assert_eq!(uplinks(&rig), [UPLINK, UPLINK]);
    let ends: Vec<_> = rig.records().iter().map(|r| r["end"].clone()).collect();
    assert_eq!(ends, ["route"]);
}

#[test]
fn a_question_of_dns_is_asked_about_with_its_protocol_and_port() {
    let (rig, kernel) = rig();
    kernel.set(0, Answer::Table(254));
    let network = &rig.engine.core.nat.network;
    for (protocol, port) in [
        (Protocol::Udp, 53),
        (Protocol::Tcp, 53),
        (Protocol::Tcp, 853),
    ] {
        let way = network.way(VmId::new(101), (PEER, port).into(), protocol);
        assert_eq!(way.unwrap().link, Some(UPLINK));
        let [asked] = kernel.asked()[..] else {
            panic!("one question is due");
        };
        assert_eq!(asked.transport, Transport::to(protocol, port));
    }
}

/// A VM's frames wait for their turn by their work, and questions to the kernel are work.
#[test]
fn a_question_to_the_kernel_is_work_of_the_vm_that_makes_it_necessary() {
    let (mut rig, kernel) = rig();
    kernel.set(5_000, Answer::NoRoute);
    let mut work = || {
        let first = udp((GUEST, 5_000), SERVER, b"x");
        let mut sender = rig.kernel.borrow_mut();
        sender.guest_sends(1, VirtioNetHdr::default(), &first);
        drop(sender);
        rig.engine.read_frames().unwrap();
        rig.engine.handle_some(WORK_PER_TURN)
    };
    // The refusal and the guest's answer, with a question and without.
    assert_eq!((work(), kernel.asked().len()), (1 + QUESTION_WORK, 1));
    assert_eq!((work(), kernel.asked().len()), (1, 0), "it is known");
}

/// A question is two system calls, and a turn of the loop serves all VMs.
#[test]
fn a_turn_of_a_walk_asks_about_some_flows_and_in_the_end_about_all() {
    const FLOWS: u16 = 600;
    let (mut rig, kernel) = rig();
    for port in 40_000..40_000 + FLOWS {
        kernel.set(port, Answer::Table(254));
        rig.guest(1, &udp((GUEST, port), SERVER, b"x"));
    }
    assert_eq!(rig.flows(), usize::from(FLOWS));
    kernel.asked();
    rig.follow(undecided(2));
    let most = (STEPS_PER_TURN / STEPS_PER_QUESTION + 1) as usize;
    let (mut asked, mut turns) = (0, 0);
    loop {
        let now = kernel.asked().len();
        assert!(now <= most, "{now} in turn {turns}");
        asked += now;
        if !rig.engine.core.nat.network.following.is_under_way() {
            break;
        }
        turns += 1;
        rig.turn();
    }
    assert_eq!(asked, usize::from(FLOWS));
}
