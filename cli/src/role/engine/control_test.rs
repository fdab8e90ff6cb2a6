use super::*;

/// Whatever a rule's comment or a name's owner makes of it.
#[test]
fn an_answer_of_any_length_goes_in_a_packet() {
    for text in ["x", "\u{1}", "\"", "\\", "\n", "\u{e9}", "\u{1f980}"] {
        let long = text.repeat(70_000);
        let (broker, engine) = Channel::pair().unwrap();
        let mut control = BrokerChannel::new(Rc::new(engine));
        let answer = Why {
            admitted: true,
            rule: long.clone(),
            refusal: None,
            outcome: long.clone(),
            explanation: long.clone(),
            via: None,
            lacks_address: false,
        };
        let reply = ControlReply::Why { request: 7, answer };
        control.send(reply).unwrap();
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
    let (broker, engine) = Channel::pair().unwrap();
    let mut control = BrokerChannel::new(Rc::new(engine));
    let about = Some(Subject::Flow {
        slot: 1,
        generation: 2,
    });
    for (id, about, request) in [
        (1, about, EngineRequest::Thaw),
        (2, None, EngineRequest::Cut),
    ] {
        let message = ToEngine::<std::os::fd::OwnedFd>::Request { id, about, request };
        broker.send(message).unwrap();
        assert!(control.recv().unwrap().is_none());
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
