use std::{fs, io::Write as _};

use super::*;

fn flow(id: u32) -> String {
    format!(
        "{{\"event\":\"flow_start\",\"id\":\"{id}\",\"vm\":\"a\",\"proto\":\"tcp\",\
         \"remote\":\"192.0.2.1:{id}\",\"direction\":\"outbound\"}}\n"
    )
}

/// The ports of the flows that are new.
fn more(follower: &mut Follower) -> Vec<u16> {
    let mut ports = Vec::new();
    let mut each = |seen| match seen {
        Seen::Flow { to, .. } => ports.push(to.port),
        other => panic!("{other:?}"),
    };
    follower.more(&mut each).unwrap();
    ports
}

#[test]
fn what_is_written_to_the_old_file_after_a_rotation_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flows.jsonl");
    fs::write(&path, flow(1)).unwrap();
    let mut old = File::options().append(true).open(&path).unwrap();
    let mut follower = Follower::open(&path).unwrap();
    assert_eq!(more(&mut follower), [1]);
    fs::rename(&path, dir.path().join("flows.jsonl.1")).unwrap();
    // As `logrotate` with `create` does; its writer is told later.
    fs::write(&path, "").unwrap();
    old.write_all(flow(2).as_bytes()).unwrap();
    assert_eq!(more(&mut follower), [2]);
    old.write_all(flow(3).as_bytes()).unwrap();
    fs::write(&path, flow(4)).unwrap();
    assert_eq!(more(&mut follower), [3, 4]);
    assert_eq!(more(&mut follower), [0; 0]);
}

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
    ] {
        assert_eq!(time_ns(bad), None, "{bad}");
    }
}
