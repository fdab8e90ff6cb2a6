use super::*;

#[test]
fn an_event_is_known_by_its_kind_and_vm() {
    let vm = || "a".to_owned();
    let all = [
        Event::VmAdded { vm: vm() },
        Event::VmChanged { vm: vm() },
        Event::VmRemoved { vm: vm() },
        Event::TapCame { vm: vm() },
        Event::TapGone { vm: vm() },
        Event::VmFrozen { vm: vm() },
        Event::VmThawed { vm: vm() },
        Event::BudgetSpent {
            vm: vm(),
            direction: "tx".into(),
            bytes: 1_000,
        },
        Event::VmAsleep { vm: vm() },
        Event::VmAwake { vm: vm() },
        Event::Wake {
            vm: vm(),
            proto: "tcp".into(),
            from: "192.0.2.1:40000".parse().unwrap(),
            to: "192.0.2.9:8080".parse().unwrap(),
        },
        Event::VmIdle {
            vm: vm(),
            silence: Silence {
                last_from_guest_ms: Some(5_000),
                last_to_guest_ms: None,
                flows: 1,
            },
        },
        Event::VmBusy {
            vm: vm(),
            silence: Silence::default(),
        },
        Event::MachinePaused { vm: vm() },
        Event::MachineResumed { vm: vm() },
        Event::MachineSaved { vm: vm() },
        Event::MachineEnded {
            vm: vm(),
            outcome: Some("powered_off".into()),
            exit_code: Some(0),
        },
        Event::PolicyApplied { cut: 1, kept: 2 },
        Event::EngineEnded { how: vm() },
        Event::EngineServes { adopted: 1 },
        Event::Displaced {
            device: "eth0".into(),
            place: "runs behind another".into(),
        },
        Event::FirstAgain {
            device: "eth0".into(),
        },
    ];
    for (event, kind) in all.iter().zip(Event::KINDS) {
        let object = serde_json::to_value(event).unwrap();
        assert_eq!(object["event"], kind);
        assert_eq!(event.kind(), kind);
        assert_eq!(object["vm"].as_str(), event.vm());
    }
    assert_eq!(all.len(), Event::KINDS.len());
}
