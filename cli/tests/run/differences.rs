//! `slipgate snapshot --diff`, and what is restored from it.
use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use slipgate_testbed::{
    MicroVm, require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal,
    world::SERVER,
};

use crate::{Bed, WAIT};

/// The id of a snapshot that differs from another: what it says of that.
fn base_of(dir: &Path) -> String {
    let text = fs::read_to_string(dir.join("machine.json")).unwrap();
    let machine: serde_json::Value = serde_json::from_str(&text).unwrap();
    machine["base"]["id"].as_str().unwrap().to_owned()
}

fn restore(bed: &Bed, dir: &Path) -> MicroVm {
    bed.start_with(&["--restore", dir.to_str().unwrap()])
}

#[test]
fn a_machine_goes_on_from_differences_and_needs_their_base() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let close = TcpServer::start(&bed.world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let work = format!("wait 3s; crr {} 40 x4 close", close.address());
    let flags = [
        "--cpus",
        "2",
        "--memory",
        "64",
        "--name",
        "web",
        "--cmdline",
        &work,
    ];
    let mut vm = bed.start_with(&flags);
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let at = |name: &str| bed.folder.path().join(name);
    let dirs = ["whole", "other", "later", "latest"].map(at);
    let [whole, other, later, latest] = &dirs;
    let path = |dir: &Path| dir.display().to_string();
    bed.have(&["snapshot", "web", &path(whole)]);
    bed.have(&["snapshot", "web", &path(other)]);
    bed.have(&["snapshot", "web", &path(later), "--diff", &path(whole)]);
    bed.have(&["snapshot", "web", &path(latest), "--diff", &path(later)]);
    signal(vm.broker_pid(), libc::SIGTERM);
    vm.finish(WAIT).unwrap();
    let blocks = |dir: &Path| fs::metadata(dir.join("memory")).unwrap().blocks();
    assert!(
        blocks(later) < blocks(whole) / 2,
        "{} {}",
        blocks(later),
        blocks(whole)
    );

    // Its work is done where it is restored, twice at once.
    let both = [(); 2].map(|()| restore(&bed, latest));
    for vm in both {
        let end = vm.finish(2 * WAIT).unwrap();
        end.assert_success();
    }
    bed.assert_nothing_is_left();

    // Its base is gone, or another snapshot is in its place.
    let id = base_of(later);
    let elsewhere = at("elsewhere");
    fs::rename(whole, &elsewhere).unwrap();
    let end = restore(&bed, latest).finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
    assert!(
        end.stderr.contains(&id) && end.stderr.contains(&path(whole)),
        "{}",
        end.stderr
    );
    fs::rename(other, whole).unwrap();
    let end = restore(&bed, later).finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
    assert!(
        end.stderr.contains(&format!("from the snapshot {id}")),
        "{}",
        end.stderr
    );
    let state = fs::read(whole.join("state")).unwrap();
    let found: String = state[16..48]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert!(
        end.stderr.contains(&format!("is the snapshot {found}")),
        "{}",
        end.stderr
    );
    bed.assert_nothing_is_left();
}
