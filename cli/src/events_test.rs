use super::*;

fn args(vm: Option<&str>, kind: &[&str], after: Option<u64>) -> EventsArgs {
    EventsArgs {
        vm: vm.map(str::to_owned),
        kind: kind.iter().map(|kind| (*kind).to_owned()).collect(),
        after,
        json: false,
        api: None,
        pin_dir: PathBuf::new(),
    }
}

#[test]
fn what_was_typed_becomes_parameters() {
    assert_eq!(target(&args(None, &[], None)), "/v1/events");
    let all = args(Some("a b&c"), &["dns", "flow_end"], Some(7));
    assert_eq!(
        target(&all),
        "/v1/events?vm=a%20b%26c&kind=dns%2Cflow_end&after=7"
    );
}

#[test]
fn an_event_is_a_line_of_text_that_no_guest_can_forge() {
    let event = serde_json::json!({
        "event": "dns", "seq": 3, "vm": "a", "name": "x.test\n4 vm_removed b", "ttl_s": 300,
        "answers": ["192.0.2.1"], "rcode": "NOERROR",
    });
    assert_eq!(
        text(event.as_object().unwrap()),
        r#"3 dns a answers=["192.0.2.1"] name="x.test\n4 vm_removed b" rcode=NOERROR ttl_s=300"#
    );
}

fn print_all(lines: &str, json: bool) -> String {
    let mut out = Vec::new();
    print(lines.as_bytes(), json, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn lines_are_printed_as_they_are_or_as_text() {
    let lines = "{\"event\":\"vm_added\",\"seq\":1,\"vm\":\"a\"}\n";
    assert_eq!(print_all(lines, true), lines);
    assert_eq!(print_all(lines, false), "1 vm_added a\n");
}
