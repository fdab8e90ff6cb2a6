use std::collections::BTreeSet;

use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{KeyCode, KeyModifiers},
};
use slipgate_abi::{DropCounters, SlotIndex, VmCounters};
use slipgate_ipc::{client::Target, engine::RelayedCounts};
use slipgate_model::{FlowId, TranslatedId};

use super::{
    state::{Action, Change, Reading, State},
    view,
};
use crate::{
    args::TopOrder,
    show::{
        flows::{Flow, Remote},
        stats::VmStats,
    },
};

fn flow(slot: u32, vm: &str, bytes: (u64, u64), age_ms: u64, name: Option<&str>) -> Flow {
    Flow {
        id: FlowId::Translated(TranslatedId {
            instance: 0xabc,
            slot: SlotIndex::new(slot),
            generation: 1,
        }),
        vm: vm.into(),
        labels: Default::default(),
        proto: "tcp",
        guest: format!("10.0.2.15:{}", 40_000 + slot).parse().unwrap(),
        remote: Remote::Port(format!("198.51.100.{slot}:443").parse().unwrap()),
        nat: format!("192.0.2.1:{}", 61_000 + slot).parse().ok(),
        host: None,
        uplink: None,
        verdict: "fast",
        path: "kernel",
        direction: "outbound",
        frozen: false,
        state: "established".into(),
        rule: "--default allow".into(),
        dns_name: name.map(str::to_owned),
        tx_packets: 1,
        tx_bytes: bytes.0,
        rx_packets: 1,
        rx_bytes: bytes.1,
        age_ms,
        idle_ms: 0,
    }
}

fn vm(name: &str, tx: u64, rx: u64) -> VmStats {
    let counters = VmCounters {
        ended_tx: slipgate_abi::Counter {
            packets: 1,
            bytes: tx,
        },
        ended_rx: slipgate_abi::Counter {
            packets: 1,
            bytes: rx,
        },
        ..VmCounters::default()
    };
    let drops = DropCounters {
        spoofed: slipgate_abi::Counter {
            packets: 3,
            bytes: 0,
        },
        ..DropCounters::default()
    };
    VmStats::new(name.into(), &counters, &drops, &[])
}

fn state(order: TopOrder) -> State {
    let mut state = State::new(order, None);
    let reading = |second: u64| Reading {
        at_ns: second * 1_000_000_000,
        flows: vec![
            flow(1, "web", (1_000, 50_000 * second), 90_000, None),
            flow(
                2,
                "agent",
                (700 * second, 9_000_000),
                3_000,
                Some("api.example.com"),
            ),
            flow(3, "agent", (10, 10), 7_500_000, None),
        ],
        vms: vec![vm("agent", 700 * second, 10), vm("web", 0, 50_000 * second)],
        frozen: ["web".to_owned()].into(),
    };
    state.take(reading(1));
    state.take(reading(3));
    state
}

fn picture(state: &State, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| view::draw(state, frame.area(), frame.buffer_mut()))
        .unwrap();
    view::text(terminal.backend().buffer())
}

fn press(state: &mut State, keys: &str) -> Action {
    let mut last = Action::Nothing;
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\x1b' => KeyCode::Esc,
            other => KeyCode::Char(other),
        };
        last = state.press(code, KeyModifiers::NONE);
    }
    last
}

#[test]
fn eighty_columns_are_enough() {
    let picture = picture(&state(TopOrder::Rate), 80, 14);
    let expected = "\
slipgate top  2 VMs  3 flows  tx 700B/s  rx 50.0KB/s  by rate
VM                  FLOWS     TX/s     RX/s   DROPPED   REFUSED STATE
web                     0        0    50.0K         3         0 frozen
agent                   0      700        0         3         0

VM         PROTO PORT   TO                           TX/s    RX/s   BYTES    AGE
web        tcp   40001  198.51.100.1:443                0   50.0K    151K  1m30s
agent      tcp   40002  api.example.com:443           700       0    9.0M     3s
agent      tcp   40003  198.51.100.3:443                0       0      20  2h05m




q quit  r/b/a/n sort  / filter  p pause  arrows select  c cut  f freeze/thaw
";
    assert_eq!(picture, expected, "\n{picture}");
}

#[test]
fn a_wide_terminal_has_room_for_states_and_rules() {
    let picture = picture(&state(TopOrder::Rate), 130, 12);
    assert!(picture.contains("established --default allow"), "{picture}");
}

/// The slots of the flows as they are shown.
fn order(state: &State) -> Vec<u32> {
    let flows = state.flows().into_iter();
    flows
        .map(|flow| match flow.id {
            FlowId::Translated(id) => id.slot.get(),
            FlowId::Relayed(id) => panic!("{id}"),
        })
        .collect()
}

#[test]
fn keys_sort_filter_and_pause() {
    let mut state = state(TopOrder::Rate);
    for (key, slots) in [
        ("b", [2, 1, 3]),
        ("a", [3, 1, 2]),
        ("n", [1, 3, 2]),
        ("r", [1, 2, 3]),
    ] {
        press(&mut state, key);
        assert_eq!(order(&state), slots, "{key}");
    }
    press(&mut state, "/Agent");
    assert_eq!(order(&state), [2, 3]);
    assert!(picture(&state, 80, 24).contains("filter: Agent_"));
    press(&mut state, "\n");
    assert!(picture(&state, 80, 24).contains("filter: Agent\n"));
    press(&mut state, "/\x1b");
    assert_eq!(order(&state).len(), 3, "Esc takes the filter away");
    press(&mut state, "p");
    assert!(state.is_paused() && picture(&state, 80, 24).contains("PAUSED"));
    assert_eq!(press(&mut state, "q"), Action::Quit);
}

#[test]
fn what_is_selected_is_cut_and_its_vm_frozen_or_thawed() {
    let mut state = state(TopOrder::Rate);
    press(&mut state, "jj");
    match press(&mut state, "c") {
        Action::Ask(Change::Cut(what), words) => {
            assert_eq!(what, Target::Flow("00000abc-2-1".into()));
            assert_eq!(words, "tcp of agent to api.example.com:443");
        }
        other => panic!("{other:?}"),
    }
    let freeze = Change::Freeze("agent".into());
    assert_eq!(press(&mut state, "f"), Action::Ask(freeze, "agent".into()));
    press(&mut state, "k");
    let thaw = Change::Thaw("web".into());
    assert_eq!(press(&mut state, "f"), Action::Ask(thaw, "web".into()));
    // The selection stays with its flow, wherever that goes.
    press(&mut state, "b");
    assert_eq!(state.selected(&state.flows()), Some(1));
    press(&mut state, "jjjj");
    let last = state.flows()[2].id;
    press(&mut state, "a");
    let at = state.selected(&state.flows()).unwrap();
    assert_eq!(state.flows()[at].id, last);
}

#[test]
fn what_nobody_selected_is_neither_cut_nor_frozen() {
    let mut state = state(TopOrder::Rate);
    for key in ["c", "f"] {
        assert_eq!(press(&mut state, key), Action::Nothing);
        assert!(state.message().contains("nothing is selected"), "{key}");
    }
    // The selected flow ends: another in its place is not meant.
    press(&mut state, "jj");
    let gone = state.flows()[1].id;
    let left = state.flows().into_iter().filter(|flow| flow.id != gone);
    let flows = left.cloned().collect();
    let vms = vec![vm("agent", 0, 0), vm("web", 0, 0)];
    let at_ns = 4_000_000_000;
    let frozen = BTreeSet::new();
    state.take(Reading {
        at_ns,
        flows,
        vms,
        frozen,
    });
    for key in ["c", "f"] {
        assert_eq!(press(&mut state, key), Action::Nothing);
        let message = state.message();
        assert!(message.contains("the selected flow is gone"), "{message}");
    }
    assert!(picture(&state, 80, 24).contains("select a flow with the arrows"));
}

#[test]
fn a_vm_alone_is_frozen_without_a_selection_and_thawed_as_it_is_now() {
    let mut state = State::new(TopOrder::Rate, Some("web".into()));
    let vms = vec![vm("agent", 0, 0), vm("web", 0, 0)];
    state.take(Reading {
        vms,
        ..Reading::default()
    });
    press(&mut state, "p");
    let freeze = Change::Freeze("web".into());
    assert_eq!(press(&mut state, "f"), Action::Ask(freeze, "web".into()));
    // Paused: no reading comes, and it is frozen now.
    state.know_frozen(["web".to_owned()].into());
    let thaw = Change::Thaw("web".into());
    assert_eq!(press(&mut state, "f"), Action::Ask(thaw, "web".into()));
}

#[test]
fn nothing_at_all_can_be_drawn_and_asked() {
    let mut state = State::new(TopOrder::Rate, None);
    for (width, height) in [(80, 24), (1, 1), (10, 3)] {
        picture(&state, width, height);
    }
    assert_eq!(press(&mut state, "jckf"), Action::Nothing);
}

#[test]
fn relayed_flows_are_rows_like_others_and_in_their_vms_sums() {
    let mut state = State::new(TopOrder::Rate, None);
    let reading = |second: u64| {
        let relayed = Flow {
            id: FlowId::parse("r00000abc-7").unwrap(),
            verdict: "relay",
            ..flow(1, "web", (1_000 * second, 0), 90_000, None)
        };
        let mut web = vm("web", 0, 0);
        web.relayed = Some(RelayedCounts {
            flows: 1,
            tx_bytes: 1_000 * second,
            ..RelayedCounts::default()
        });
        Reading {
            at_ns: second * 1_000_000_000,
            flows: vec![relayed],
            vms: vec![web],
            ..Reading::default()
        }
    };
    state.take(reading(1));
    state.take(reading(2));
    let picture = picture(&state, 80, 14);
    assert!(
        picture.starts_with("slipgate top  1 VM  1 flow  tx 1.0KB/s"),
        "{picture}"
    );
    let rows: Vec<&str> = picture.lines().filter(|l| l.starts_with("web")).collect();
    assert!(rows.iter().all(|row| row.contains("1.0K")), "{picture}");
    press(&mut state, "j");
    match press(&mut state, "c") {
        Action::Ask(Change::Cut(what), _) => {
            assert_eq!(what, Target::Flow("r00000abc-7".into()));
        }
        other => panic!("{other:?}"),
    }
}
