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
