use std::net::TcpListener;

use slipgate_policy::document::{CliOverrides, forwards_of_vm};

use super::*;
use crate::{
    config::tests::config, kernel_state::ResourceTaken, userspace::place::tests::place_of,
};

const VM: &str = "vm";

/// A configuration with these forwards, and the VM's place.
fn with(specs: &[String]) -> (tempfile::TempDir, Config, Place) {
    let flags = CliOverrides {
        forwards: specs.to_vec(),
        ..CliOverrides::default()
    };
    let nat = config(&[VM], flags);
    let (dir, place) = place_of(&nat);
    (dir, nat, place)
}

/// Ports that nobody has.
fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|it| it.local_addr().unwrap().port())
}

fn spec(port: u16, guest_port: u16) -> String {
    format!("tcp:127.0.0.1:{port}:{guest_port}")
}

fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok()
}

fn forwards(specs: &[String]) -> Vec<Forward> {
    forwards_of_vm(specs, VM).unwrap()
}

#[test]
fn what_stays_is_not_touched_and_what_goes_is_free() {
    let [stays, goes, leads, comes] = free_ports();
    let before = [spec(stays, 80), spec(goes, 81), spec(leads, 82)];
    let (_dir, nat, place) = with(&before);
    let mut held = Forwards::reserve(&nat).unwrap();
    assert_eq!(held.specs(), before);
    let after = [spec(leads, 90), spec(stays, 80), spec(comes, 83)];
    let change = held.reserve_change(forwards(&after)).unwrap();
    assert_eq!(held.specs(), before, "nothing has changed yet");
    let message = held.put(7, change, &place);
    assert_eq!(held.specs(), after);
    let ToEngine::ChangeForwards {
        id, removed, added, ..
    } = message
    else {
        panic!("{message:?}");
    };
    let at = |port| (6, SocketAddr::from(([127, 0, 0, 1], port)));
    let mut removed = removed;
    removed.sort();
    let mut expected = vec![at(goes), at(leads)];
    expected.sort();
    assert_eq!((id, removed), (7, expected));
    let first = place.policies.forwards().start;
    let shown = added.iter().map(|new| {
        let text = &held.texts()[(new.rule.get() - first) as usize];
        (new.host.port(), new.guest_port, text.as_str())
    });
    let shown: Vec<_> = shown.collect();
    assert_eq!(shown, [(leads, 90, OF_ITS_VM), (comes, 83, OF_ITS_VM)]);
    drop(added);
    let free = [stays, goes, leads, comes].map(is_free);
    assert_eq!(free, [false, true, false, false]);
    place.leave();
}

#[test]
fn a_change_that_is_not_made_takes_no_port() {
    let [stays, comes] = free_ports();
    let (_dir, nat, place) = with(&[spec(stays, 80)]);
    let held = Forwards::reserve(&nat).unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = other.local_addr().unwrap().port();
    let refused = held.reserve_change(forwards(&[spec(comes, 80), spec(taken, 81)]));
    let refused = refused.unwrap_err();
    assert!(refused.is::<ResourceTaken>(), "{refused:#}");
    assert!(is_free(comes) && !is_free(stays));
    drop(held.reserve_change(forwards(&[spec(comes, 80)])).unwrap());
    assert!(is_free(comes) && !is_free(stays));
    place.leave();
}
