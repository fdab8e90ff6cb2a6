//! vsock for long: the device of `slipgate run`, with a guest and a program that send at the same time.
use std::{os::unix::net::UnixListener, thread, time::Duration};

use slipgate_testbed::{
    MicroVm, PinDir, World, require_kvm,
    vsock_messages::{assert_all_went_each_way, talk},
    world::UPLINK,
};

use super::{WAIT, knob};

/// Some fifty times what a message each way takes on two CPUs with nothing beside it.
const EACH: Duration = Duration::from_millis(1);

#[test]
fn a_million_messages_each_way_are_all_there() {
    begin!();
    require_kvm!();
    let count = knob("SLIPGATE_STRESS_MESSAGES", 1_000_000);
    let (world, pins) = (World::new().unwrap(), PinDir::new().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let program = UnixListener::bind(at("vm.sock_52")).unwrap();
    let work = format!("vsock messages 52 1 {count}; wait 1");
    let vsock = format!("3,{}", at("vm.sock"));
    let flags = ["--uplink", UPLINK, "--cmdline", &work, "--vsock", &vsock];
    let vm = MicroVm::start(&world.host, &pins, &flags).unwrap();
    let program = thread::spawn(move || talk(program.accept().unwrap().0, count));
    let end = vm
        .finish(WAIT + EACH * u32::try_from(count).unwrap())
        .unwrap();
    assert_all_went_each_way(&end, count);
    program.join().unwrap().unwrap();
    println!(
        "{count} messages each way: {:.1} s",
        end.after.as_secs_f64()
    );
}
