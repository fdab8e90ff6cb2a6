use slipgate_abi::SlotIndex;
use slipgate_policy::{Action, Policy, Rule};
use userspace_nat::{
    dns,
    event_loop::Parts,
    fake::{FakeClock, FakeDatapath, FakePort, Kernel},
    name_gate::Judge,
    record::FlowLog,
    relay::{Limits, Relay},
    services::Services,
};

use super::*;

/// An engine over tables in memory, without VMs.
fn engine() -> Engine<FakeDatapath, FakePort, FakeClock> {
    let kernel = Kernel::new(1_024);
    Engine::new(Parts {
        datapath: FakeDatapath::new(&kernel, 0, 1),
        port: FakePort::new(&kernel),
        clock: FakeClock::new(&kernel),
        services: Services::new(
            dns::Proxy::new(&[], dns::Limits::default(), Box::new(dns::AllowAll)),
            Relay::new(Limits::default()),
        ),
        judge: Judge::shared(Policy::new(Action::Deny, Vec::<Rule>::new())),
        nat_ports: 61_000..=61_999,
        log: FlowLog::new(None),
    })
    .unwrap()
}

/// The text can come from a rule's comment or from the owner of a DNS name.
#[test]
fn an_answer_of_any_length_goes_in_a_packet() {
    for text in ["x", "\u{1}", "\"", "\\", "\n", "\u{e9}", "\u{1f980}"] {
        let long = text.repeat(70_000);
        let answer = WhyAnswer {
            admitted: true,
            rule: long.clone(),
            refusal: None,
            outcome: long.clone(),
            explanation: long.clone(),
            via: None,
            lacks_address: false,
        };
        let (broker, engine) = Channel::pair().unwrap();
        let mut control = BrokerChannel::new(Rc::new(engine));
        let reply = EngineReply::Why(truncate_texts(answer));
        let message = FromEngine::Reply { id: 7, reply };
        control.send(message, None).unwrap();
        let Some(FromEngine::Reply {
            id: 7,
            reply: EngineReply::Why(answer),
        }) = broker.receive().unwrap()
        else {
            panic!("no answer");
        };
        for shown in [answer.rule, answer.outcome, answer.explanation] {
            let json = serde_json::to_string(&shown).unwrap();
            // A newline is counted as if it were another control character.
            let least = if text == "\n" {
                TEXT_BYTES / 3
            } else {
                TEXT_BYTES
            } - 20;
            assert!((least..=TEXT_BYTES + 2).contains(&json.len()), "{text:?}");
            assert!(long.starts_with(shown.strip_suffix(" ...").unwrap()));
        }
    }
    assert_eq!(truncate_json("short".into()), "short");
}

/// A broker of another version, or a mistake of its: who asked is told, and the engine serves on.
#[test]
fn a_request_about_nothing_that_it_can_be_asked_of_is_refused() {
    let (broker, ours) = Channel::pair().unwrap();
    let mut control = BrokerChannel::new(Rc::new(ours));
    let mut engine = engine();
    let about = Some(Subject::Flow {
        slot: SlotIndex::new(1),
        generation: 2,
    });
    for (id, about, request) in [
        (1, about, EngineRequest::Thaw),
        (2, None, EngineRequest::Cut),
    ] {
        let message = ToEngine::<std::os::fd::OwnedFd>::Request { id, about, request };
        broker.send(message).unwrap();
        control.serve(&mut engine).unwrap();
        let reply = broker.receive::<FromEngine>().unwrap();
        assert!(
            matches!(
                reply,
                Some(FromEngine::Reply { id: of, reply: EngineReply::Refused { .. } }) if of == id
            ),
            "{reply:?}"
        );
    }
}
