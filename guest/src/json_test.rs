use super::*;

#[test]
fn a_line_of_every_kind_of_field_reads_back() {
    let inner = Object::default().number("refused", 1);
    let line = Object::about("workload", "crr")
        .number("n", u64::MAX)
        .microseconds("p50_us", 86_042)
        .ratio("gbit", 2, 3)
        .ratio("nothing", 1, 0)
        .truth("end", true)
        .text("error", "a \"b\" \\ \n é")
        .shown("address", core::net::Ipv4Addr::LOCALHOST)
        .shown_list("dns", [1, 2])
        .object("failures", inner)
        .into_line();
    let read: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(
        read,
        serde_json::json!({
            "workload": "crr", "n": u64::MAX, "p50_us": 86.042, "gbit": 0.666, "nothing": 0.0,
            "end": true, "error": "a \"b\" \\ \n é", "address": "127.0.0.1", "dns": ["1", "2"],
            "failures": {"refused": 1},
        })
    );
    assert_eq!(Object::default().into_line(), "{}");
}
