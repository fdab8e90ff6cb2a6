//! Changes through the API of `slipgate serve` that meet each other, and an engine that ends.

use std::thread;

use serde_json::{Value, json};

use crate::{BRIEFLY, Cell, api::Stand, eventually, matrix::matrix};

matrix! {
    changes_of_policy_are_made_one_after_another: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    changes_wait_for_the_next_engine_and_the_daemon_lives: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
}

fn put(stand: &Stand, vm: &str) {
    let body = json!({ "tap": vm });
    let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{vm}"), Some(body));
    assert_eq!(status, 201, "{vm}");
}

/// Each waits for its turn, whatever is removed meanwhile.
fn changes_of_policy_are_made_one_after_another(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let _guests = ["a", "b"].map(|tap| stand.guest(tap));
    ["a", "b"].iter().for_each(|vm| put(&stand, vm));
    let policy = json!({ "default": "deny" });
    let text = "default = \"deny\"";
    let path = "/v1/policies/closed";
    assert_eq!(stand.put_policy(path, text), 200);
    // It carries out the first change when it goes on.
    stand.signal_engine(libc::SIGSTOP);
    thread::scope(|scope| {
        let ask = |method: &'static str, path: &'static str, body: Value| {
            let stand = &stand;
            let asked = scope.spawn(move || stand.ask(method, path, Some(body)));
            thread::sleep(BRIEFLY);
            asked
        };
        let closed = || json!({ "policy": "closed" });
        let of_a = ask("PATCH", "/v1/vms/a", closed());
        let put = scope.spawn(|| stand.put_policy(path, "default = \"allow\""));
        thread::sleep(BRIEFLY);
        let of_b = ask("PATCH", "/v1/vms/b", closed());
        let own = ask("PATCH", "/v1/vms/b", json!({ "policy": policy }));
        let removed = ask("DELETE", "/v1/vms/a", Value::Null);
        stand.signal_engine(libc::SIGCONT);
        let (status, problem) = of_a.join().unwrap();
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert_eq!((status, detail), (404, "the VM was removed meanwhile"));
        assert_eq!(put.join().unwrap(), 200);
        for change in [of_b, own] {
            let (status, vm) = change.join().unwrap();
            assert_eq!(status, 200, "{vm}");
        }
        assert_eq!(removed.join().unwrap().0, 204);
    });
    let (_, vms) = stand.ask("GET", "/v1/vms", None);
    assert_eq!(vms.as_array().map(Vec::len), Some(1), "{vms}");
    assert_eq!(vms[0]["policy"], policy);
}

/// However often it ends: one guest may be the cause, and others want to be served.
fn changes_wait_for_the_next_engine_and_the_daemon_lives(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let engine = || stand.daemon.children_named("slipgate-engine").pop();
    for _ in 0..7 {
        eventually("there is an engine", engine);
        stand.signal_engine(libc::SIGKILL);
        put(&stand, "a");
        assert_eq!(
            stand.put_policy("/v1/policies/p", "default = \"deny\""),
            200
        );
        assert_eq!(stand.ask("DELETE", "/v1/vms/a", None).0, 204);
    }
}
