use super::*;

fn add(events: &Events, vm: &str) {
    events.add(&Event::VmAdded { vm: vm.into() });
}

fn seen(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn events_have_numbers_and_are_filtered() {
    let events = Events::default();
    for vm in ["a", "b", "a"] {
        add(&events, vm);
    }
    events.add(&Event::VmRemoved { vm: "a".into() });
    let filter = Filter {
        vm: Some("a".into()),
        kinds: vec!["vm_added".into()],
    };
    let (text, last) = events.after(0, &filter);
    assert_eq!(last, 4);
    let numbers: Vec<_> = seen(&text)
        .iter()
        .map(|event| event["seq"].clone())
        .collect();
    assert_eq!(numbers, [1, 3]);
    assert_eq!(events.after(3, &filter).0, "");
    assert_eq!(seen(&events.after(3, &Filter::default()).0).len(), 1);
}

#[test]
fn a_slow_reader_is_told_how_much_it_missed() {
    let events = Events::default();
    for _ in 0..KEPT + 10 {
        add(&events, "a");
    }
    let (text, last) = events.after(3, &Filter::default());
    let lines = seen(&text);
    assert_eq!(lines[0], json!({ "event": "lost", "seq": 10, "events": 7 }));
    assert_eq!(lines[1]["seq"], 11);
    assert_eq!(lines.len(), KEPT + 1);
    assert_eq!(last, KEPT as u64 + 10);
}

#[tokio::test]
async fn a_reader_waits_for_the_next_event() {
    let events = std::rc::Rc::new(Events::default());
    let filter = Filter::default();
    let (got, ()) = tokio::join!(events.next(0, &filter), async {
        tokio::task::yield_now().await;
        add(&events, "a");
    });
    assert_eq!(seen(&got.0)[0]["vm"], "a");
    assert_eq!(got.1, 1);
}
