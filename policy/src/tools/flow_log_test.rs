use super::*;

#[test]
fn refusals_by_rules_are_told_and_those_by_quotas_are_not() {
    let line = |reason: &str| {
        let text = format!(
            "{{\"event\":\"refused\",\"vm\":\"a\",\"reason\":\"{reason}\",\"count\":3,\
             \"proto\":\"tcp\",\"remote\":\"192.0.2.1:853\"}}"
        );
        Reader::default().line(&text).is_some()
    };
    use slipgate_abi::Refusal;
    for told in [
        Refusal::Rule,
        Refusal::Default,
        Refusal::Protected,
        Refusal::DnsElsewhere,
    ] {
        assert!(line(told.name()), "{told:?}");
    }
    assert!(!line("flow_cap"));
}

#[test]
fn a_message_that_is_no_query_asks_for_no_name() {
    let name = |source: &str, rcode: &str| {
        let text = format!(
            "{{\"event\":\"dns\",\"vm\":\"a\",\"name\":\"a.test\",\"type\":\"TYPE252\",\
             \"source\":\"{source}\",\"rcode\":\"{rcode}\",\"answers\":[]}}"
        );
        match Reader::default().line(&text) {
            Some(Seen::Question { name, .. }) => name,
            other => panic!("{other:?}"),
        }
    };
    // REFUSED: above the rate.
    for rcode in ["NOTIMP", "FORMERR", "BADVERS", "REFUSED"] {
        assert_eq!(name("none", rcode), "");
        assert_eq!(name("upstream", rcode), "a.test");
    }
    assert_eq!(name("none", "SERVFAIL"), "a.test");
}

#[test]
fn times_are_read_as_they_are_written() {
    const SECOND: u64 = 1_000_000_000;
    for (text, at) in [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-02T00:00:01.5Z", 86_401 * SECOND + SECOND / 2),
        (
            "2000-02-29T23:59:59.999Z",
            951_868_799 * SECOND + 999_000_000,
        ),
        ("2026-11-20T20:00:00.000Z", 1_795_204_800 * SECOND),
    ] {
        assert_eq!(time_ns(text), Some(at), "{text}");
    }
    for bad in [
        "",
        "2026-11-20T20:00:00",
        "2026-13-20T20:00:00Z",
        "2026-11-20 20:00:00Z",
        "99999999999999-11-20T20:00:00Z",
        "2026-11-20T24:00:00Z",
        "2026-11-20T20:00:00.0000000001Z",
        "2026-11-20T20:00:00.-1Z",
        "2026-02-29T20:00:00Z",
        "1969-12-31T23:59:59Z",
        "2026-11-20T20:00:00+00:00",
    ] {
        assert_eq!(time_ns(bad), None, "{bad}");
    }
}
