use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
};

use super::*;

fn tied(ties: &mut Ties, vm: &str) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    ties.tie(vm, theirs.into()).unwrap();
    ours
}

#[test]
fn a_vm_ends_with_its_client_and_with_no_other() {
    let mut ties = Ties::new().unwrap();
    let mut a = tied(&mut ties, "a");
    let b = tied(&mut ties, "b");
    assert_eq!(ties.ended(), [""; 0]);
    a.write_all(b"what means nothing").unwrap();
    assert_eq!(ties.ended(), [""; 0]);
    drop(b);
    assert_eq!(ties.ended(), ["b"]);
    assert!(ties.has("a") && !ties.has("b"));
    assert_eq!(ties.ended(), [""; 0]);
    drop(a);
    assert_eq!(ties.ended(), ["a"]);
}

#[test]
fn a_client_is_told_when_its_vm_goes() {
    let mut ties = Ties::new().unwrap();
    let mut client = tied(&mut ties, "a");
    ties.untie("a");
    let mut said = Vec::new();
    client.read_to_end(&mut said).unwrap();
    assert_eq!(said, b"x");
    assert_eq!(ties.ended(), [""; 0]);
    // A daemon that ends says nothing.
    let mut client = tied(&mut ties, "a");
    drop(ties);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn clients_have_time_to_come_back_to_another_daemon() {
    let mut ties = Ties::new().unwrap();
    ties.await_client("a");
    ties.await_client("b");
    assert!(ties.due().is_some_and(|due| due > Instant::now()));
    let _client = tied(&mut ties, "a");
    for due in ties.untied.values_mut() {
        *due -= BACK_WITHIN;
    }
    assert_eq!(ties.ended(), ["b"]);
    assert_eq!(ties.due(), None);
}

#[test]
fn the_end_of_a_former_client_leaves_the_present_ones_vm() {
    let mut ties = Ties::new().unwrap();
    let former = tied(&mut ties, "a");
    let present = tied(&mut ties, "a");
    drop(former);
    assert_eq!(ties.ended(), [""; 0]);
    assert!(ties.has("a"));
    drop(present);
    assert_eq!(ties.ended(), ["a"]);
}

#[test]
fn a_machine_has_the_id_of_the_process_that_made_its_socket() {
    let mut ties = Ties::new().unwrap();
    let mut client = tied(&mut ties, "a");
    let notice = r#"{"machine": {"name": "b", "pid": 1, "state": "running", "cpus": 1,
        "memory_mib": 64, "tap": null, "netns": 1, "runs_s": 2}, "event": null}"#;
    let line = format!("{}\n", notice.replace('\n', " "));
    client.write_all(line.as_bytes()).unwrap();
    ties.hear("a");
    let machine = ties.machine("a").unwrap();
    assert_eq!(
        (machine.name.as_str(), machine.pid),
        ("a", std::process::id())
    );
    assert!(!ties.is_ending("a"));
    // It says that it ends before it does.
    let event = r#""event": {"ended": {"outcome": "stopped", "exit_code": 143}}"#;
    let line = line.replace(r#""event": null"#, event);
    client.write_all(line.as_bytes()).unwrap();
    ties.hear("a");
    assert!(ties.is_ending("a") && ties.has("a"));
    drop(client);
    assert_eq!(ties.ended(), ["a"]);
    assert!(!ties.is_ending("a"));
}
