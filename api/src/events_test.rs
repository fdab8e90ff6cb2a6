use serde_json::Value;

use super::*;

fn add(events: &Events, vm: &str) {
    events.add(&Event::VmAdded { vm: vm.into() });
}

fn record(events: &Events, kind: &str, vm: &str) {
    let line = json!({ "event": kind, "vm": vm, "x": { "y": ["}", 1] } });
    events.add_record(&line.to_string()).unwrap();
}

fn of(vm: Option<&str>, kinds: &str) -> Filter {
    Filter {
        vm: vm.map(str::to_owned),
        kinds: Kinds::parse(kinds).unwrap(),
    }
}

/// Takes the events that wait for a reader.
fn seen(reader: &Reader) -> Vec<Value> {
    reader.queue.report_lost();
    let text = std::mem::take(&mut reader.queue.waiting.borrow_mut().text);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn numbers(reader: &Reader) -> Vec<u64> {
    let all = seen(reader);
    all.iter()
        .map(|event| event["seq"].as_u64().unwrap())
        .collect()
}

#[test]
fn events_have_numbers_and_are_filtered() {
    let events = Rc::new(Events::default());
    for vm in ["a", "b", "a"] {
        add(&events, vm);
    }
    events.add(&Event::VmRemoved { vm: "a".into() });
    let reader = |after| events.read(of(Some("a"), "vm_added"), after);
    assert_eq!(numbers(&reader(Some(0))), [1, 3]);
    assert_eq!(numbers(&reader(Some(3))), [0; 0]);
    assert_eq!(numbers(&events.read(Filter::default(), Some(3))), [4]);
    let live = reader(None);
    add(&events, "a");
    add(&events, "b");
    assert_eq!(numbers(&live), [5]);
}

#[test]
fn kinds_are_named_and_unknown_ones_are_refused() {
    assert_eq!(Kinds::parse(""), Ok(Kinds::default()));
    assert!(!Kinds::default().records.has(FlowLogEvent::FlowStart));
    let some = Kinds::parse("vm_added,dns").unwrap();
    assert_eq!(some.events, ["vm_added"]);
    assert_eq!(some.records, FlowLogEvents::of(&[FlowLogEvent::Dns]));
    assert_eq!(Kinds::parse(&Kinds::names().join(",")), Kinds::parse("all"));
    let error = Kinds::parse("vm_added,colour").unwrap_err().to_string();
    assert!(
        error.contains("\"colour\"") && error.contains("flow_end"),
        "{error}"
    );
}

#[test]
fn records_are_numbered_among_the_events_and_reach_who_wants_them() {
    let events = Rc::new(Events::default());
    let all = events.read(of(None, "all"), None);
    let starts = events.read(of(Some("b"), "flow_start"), None);
    let states = events.read(Filter::default(), None);
    record(&events, "flow_start", "a");
    add(&events, "b");
    record(&events, "flow_start", "b");
    record(&events, "flow_end", "b");
    assert_eq!(numbers(&all), [1, 2, 3, 4]);
    assert_eq!(numbers(&states), [2]);
    let seen = seen(&starts);
    let wanted = json!({ "event": "flow_start", "vm": "b", "x": { "y": ["}", 1] }, "seq": 3 });
    assert_eq!(seen, [wanted]);
}

#[test]
fn what_readers_want_is_known_as_long_as_they_read() {
    let events = Rc::new(Events::default());
    let mut wanted = events.wanted();
    let now = |wanted: &mut watch::Receiver<FlowLogEvents>| {
        let changed = wanted.has_changed().unwrap();
        (changed, *wanted.borrow_and_update())
    };
    let states = events.read(Filter::default(), None);
    assert_eq!(now(&mut wanted), (false, FlowLogEvents::default()));
    let first = events.read(of(None, "dns"), None);
    let second = events.read(of(Some("a"), "dns,refused"), None);
    let both = FlowLogEvents::of(&[FlowLogEvent::Dns, FlowLogEvent::Refused]);
    assert_eq!(now(&mut wanted), (true, both));
    drop((first, states));
    assert_eq!(now(&mut wanted), (false, both));
    drop(second);
    assert_eq!(now(&mut wanted), (true, FlowLogEvents::default()));
}

#[test]
fn a_line_that_is_no_record_is_refused() {
    let events = Rc::new(Events::default());
    let reader = events.read(of(None, "all"), None);
    for line in [
        "",
        "{}",
        "{\"event\":\"flow_end\",\"vm\":\"a\"",
        "{\"event\":\"flow_end\",\"vm\":\"a\"} {}",
        "{\"event\":\"vm_removed\",\"vm\":\"a\"}",
        "{\"event\":\"lost\"}",
        "[1]",
    ] {
        assert!(events.add_record(line).is_err(), "{line}");
    }
    assert_eq!(seen(&reader), [] as [Value; 0]);
}

#[test]
fn a_reader_that_comes_late_is_told_how_much_it_missed() {
    let events = Rc::new(Events::default());
    for _ in 0..KEPT + 10 {
        add(&events, "a");
    }
    let reader = events.read(Filter::default(), Some(3));
    let lines = seen(&reader);
    assert_eq!(lines[0], json!({ "event": "lost", "seq": 10, "events": 7 }));
    assert_eq!(lines[1]["seq"], 11);
    assert_eq!(lines.len(), KEPT + 1);
    assert_eq!(lines[KEPT]["seq"], KEPT + 10);
}

#[test]
fn a_slow_reader_loses_what_it_wants_and_no_other_reader_does() {
    let events = Rc::new(Events::default());
    let slow = events.read(of(None, "flow_start,vm_added"), None);
    let states = events.read(Filter::default(), None);
    let mut began = 0;
    while slow.queue.waiting.borrow().lost < 5 {
        record(&events, "flow_start", "a");
        // Those that it does not want are not counted.
        record(&events, "dns", "a");
        began += 1;
    }
    assert!(slow.queue.waiting.borrow().text.len() <= MOST_WAITING);
    add(&events, "a");
    assert_eq!(numbers(&states), [2 * began + 1]);
    let lines = seen(&slow);
    let lost = json!({ "event": "lost", "seq": 2 * began + 1, "events": 6 });
    assert_eq!(lines.len() as u64, began - 5 + 1);
    assert_eq!(lines.last(), Some(&lost));
    // There is room again.
    add(&events, "b");
    assert_eq!(numbers(&slow), [2 * began + 2]);
    // What the engine has lost, nobody can tell apart.
    events
        .add_record("{\"event\":\"lost\",\"count\":3}")
        .unwrap();
    let seq = 2 * began + 5;
    assert_eq!(
        seen(&slow),
        [json!({ "event": "lost", "seq": seq, "events": 3 })]
    );
    assert_eq!(numbers(&states), [2 * began + 2]);
}

#[tokio::test]
async fn a_reader_waits_for_the_next_event() {
    let events = Rc::new(Events::default());
    let reader = events.read(Filter::default(), None);
    let (text, ()) = tokio::join!(reader.next(), async {
        tokio::task::yield_now().await;
        add(&events, "a");
    });
    assert!(text.contains("\"vm\":\"a\""), "{text}");
}
