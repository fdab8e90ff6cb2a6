//! `slipgate attach --socket` that is killed, or ended, and started again: QEMU's `-netdev stream` connects
//! again by itself (`reconnect`, from QEMU 8.0 on), and its guest goes on.

use std::{
    fs,
    process::{Child, Stdio},
};

use slipgate_testbed::{
    builtin_guest::image,
    clients::{tcp, tcp::EchoSession},
    left_out, require_root_and_tun, signal,
    world::HOST,
};

use crate::{
    WAIT, at, eventually, other_root,
    unprivileged::{Attached, Place},
};

const FORWARD: [&str; 4] = ["--dns", "none", "--forward", "tcp:8080:80"];

/// QEMU's option to connect again after half a second or one; `None` if it has none.
fn reconnect(place: &Place) -> Result<&'static str, String> {
    let mut version = other_root::command(place, &["qemu-system-x86_64", "--version"]);
    version.stdin(Stdio::null()).stdout(Stdio::piped());
    let version = place.world.host.spawn(version).unwrap();
    let said = version.wait_with_output().unwrap().stdout;
    let said = String::from_utf8_lossy(&said).into_owned();
    let number = said.split("version ").nth(1).unwrap_or_default();
    let mut parts = number.split(['.', ' ']).map_while(|part| part.parse().ok());
    match (parts.next(), parts.next()) {
        (Some(10..), _) | (Some(9), Some(2..)) => Ok("reconnect-ms=500"),
        (Some(8 | 9), _) => Ok("reconnect=1"),
        (Some(0..), _) => Err(format!("QEMU {number} does not connect again")),
        _ => Err("there is no QEMU".into()),
    }
}

/// Ends on drop.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_guest_of_qemu_goes_on_when_slipgate_is_started_again() {
    require_root_and_tun!();
    let place = Place::new();
    let reconnect = match reconnect(&place) {
        Ok(reconnect) => reconnect,
        Err(why) => return left_out!("{why}"),
    };
    place.user.install(&image().unwrap(), "guest").unwrap();
    let [kernel, socket, console] = ["guest", "run/web.sock", "run/console"].map(|name| {
        let path = place.file(name);
        path.to_str().unwrap().to_owned()
    });
    let link = format!("stream,id=n,server=off,{reconnect},addr.type=unix,addr.path={socket}");
    let serial = format!("file:{console}");
    let mut qemu = other_root::command(
        &place,
        &[
            "qemu-system-x86_64",
            "-M",
            "q35",
            "-accel",
            "tcg",
            "-m",
            "128",
            "-nodefaults",
            "-display",
            "none",
            "-serial",
            &serial,
            "-netdev",
            &link,
            "-device",
            "virtio-net-pci,netdev=n",
            "-kernel",
            &kernel,
            "-append",
            "serve 80 300s",
        ],
    );
    qemu.stdin(Stdio::null()).stdout(Stdio::null());
    let echoes = || {
        let host = &place.world.host;
        let mut stream = host.run(|| tcp::connect(at(HOST, 8080), WAIT)).ok()?;
        EchoSession::new(&mut stream).round(10_000).ok()?;
        Some(stream)
    };
    let mut attached = Attached::start(&place, &FORWARD);
    let _guest = Guest(place.world.host.spawn(qemu).unwrap());
    for how in [libc::SIGKILL, libc::SIGTERM, libc::SIGKILL] {
        let mut held = eventually("the guest serves", echoes);
        signal(attached.child.id(), how);
        match how {
            // Its socket stays, and is replaced.
            libc::SIGKILL => drop(attached),
            _ => assert_eq!(attached.ended(), Some(0)),
        }
        // The flows ended with the one that had them.
        let lost = EchoSession::new(&mut held).round(1);
        assert!(lost.is_err(), "{lost:?}");
        attached = Attached::start(&place, &FORWARD);
    }
    eventually("the guest goes on", echoes);
    let lines = fs::read_to_string(&console).unwrap();
    assert_eq!(lines.matches("\"boot\"").count(), 1, "{lines}");
    signal(attached.child.id(), libc::SIGTERM);
    assert_eq!(attached.end(&place), Some(0));
}
