//! `slipgate run` beside a daemon, which serves its VM for as long as it runs.
use slipgate_testbed::{
    PinDir, Slipgate, require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal, slipgate,
    world::{SERVER, UPLINK},
};

use crate::{Bed, WAIT, eventually};

fn vms(bed: &Bed, pins: &PinDir) -> serde_json::Value {
    let listed = slipgate::run(&bed.world.host, pins, &["vm", "ls", "--json"]).unwrap();
    serde_json::from_slice(&listed.stdout).unwrap()
}

#[test]
fn a_machine_is_the_daemons_vm_for_as_long_as_it_runs() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let _daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
    let close = TcpServer::start(&bed.world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let work = format!("crr {} 50 close", close.address());
    // What is said of the machine is not the daemon's.
    let of_machine = ["--jail", "auto", "--console-limit", "1M"];
    let end = bed.start_with(&[&of_machine[..], &["--cmdline", &work]].concat());
    let end = end.finish(WAIT).unwrap();
    assert_eq!(
        end.status.code(),
        Some(0),
        "{:#?}\n{}",
        end.lines,
        end.stderr
    );
    assert!(end.stderr.contains("by the daemon"), "{}", end.stderr);
    assert_eq!(vms(&bed, &bed.pins), serde_json::json!([]));

    // One that is killed leaves nothing either.
    let machine = bed.start_with(&["--name", "b", "--cmdline", "serve 7 60s"]);
    eventually("it is served", || {
        vms(&bed, &bed.pins)[0]["state"] == "served"
    });
    signal(machine.broker_pid(), libc::SIGKILL);
    eventually("it is gone", || {
        vms(&bed, &bed.pins) == serde_json::json!([])
    });
}
