//! `slipgate cni` as a runtime calls it: environment and stdin in, JSON out, in the place of which
//! a guest then reaches the world.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest, GuestConfig, NetNs, PinDir, Slipgate, World,
    clients::{tcp, tcp::EchoSession},
    frame::Mac,
    servers::{TcpServer, TcpService},
    skipped,
    slipgate::binary,
    world::UPLINK,
};

use crate::{
    Cell, WAIT,
    matrix::{at, matrix, pings},
    stand::give_ipv6,
};

matrix! {
    a_plugins_tap_leads_its_guest_to_the_world_until_it_is_taken_away: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_plugin_that_is_refused_leaves_nothing_and_katas_file_has_what_is_there: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    ports_and_a_policy_come_with_the_attachment: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    an_attachment_takes_no_vm_that_is_there: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    cnis_own_client_and_firecrackers_parser_understand_the_plugin: [hybrid_ipv4],
        without [hybrid_ipv6]: "clients are the same whatever addresses the guest has",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
}

/// A runtime, in a namespace of its own, and the namespace that it gives its VMs.
struct Runtime {
    ns: NetNs,
    netns: PathBuf,
    config: Value,
}

impl Runtime {
    fn new(world: &World, pins: &PinDir) -> Self {
        Self {
            ns: NetNs::new("runtime").unwrap(),
            netns: world.host.path(),
            config: json!({
                "cniVersion": "1.1.0",
                "name": "vms",
                "type": "slipgate",
                "pinDir": pins.path(),
            }),
        }
    }

    /// Calls the plugin; returns its answer or its error. `more` has keys of the configuration.
    fn call(&self, command: &str, container: &str, more: Value) -> Result<Value, Value> {
        let mut config = self.config.clone();
        let keys = more.as_object().cloned().unwrap_or_default();
        config.as_object_mut().unwrap().extend(keys);
        let mut plugin = Command::new(binary().unwrap());
        plugin
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_NETNS", &self.netns)
            .env("CNI_PATH", "/opt/cni/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut plugin = self.ns.spawn(plugin).unwrap();
        let mut stdin = plugin.stdin.take().unwrap();
        stdin.write_all(config.to_string().as_bytes()).unwrap();
        drop(stdin);
        let output = plugin.wait_with_output().unwrap();
        let said = match output.stdout.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&output.stdout).unwrap(),
        };
        match output.status.success() {
            true => Ok(said),
            false => Err(said),
        }
    }

    fn add(&self, container: &str) -> Value {
        self.call("ADD", container, json!({})).unwrap()
    }

    fn code(&self, command: &str, container: &str, more: Value) -> u64 {
        let error = self.call(command, container, more).unwrap_err();
        assert_eq!(error["cniVersion"], "1.1.0", "{error}");
        assert!(!error["msg"].as_str().unwrap().is_empty(), "{error}");
        error["code"].as_u64().unwrap()
    }

    /// GC, after which the network has these attachments at most.
    fn keep_only(&self, containers: &[&str]) {
        let valid = |id: &&str| json!({"containerID": id, "ifname": "eth0"});
        let valid: Vec<_> = containers.iter().map(valid).collect();
        let more = json!({"cni.dev/valid-attachments": valid, "netns": self.netns});
        self.call("GC", "", more).unwrap();
    }
}

fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value.pointer(path).unwrap().as_str().unwrap()
}

/// A guest as its VMM would make it of the result. Its IPv6, which the result leaves to itself, it has
/// at once.
fn guest(cell: Cell, world: &World, result: &Value) -> Guest {
    let mac = text(result, "/interfaces/0/mac").split(':');
    let mac: Vec<u8> = mac.map(|b| u8::from_str_radix(b, 16).unwrap()).collect();
    let mac: Mac = mac.try_into().unwrap();
    let (address, prefix) = text(result, "/ips/0/address").split_once('/').unwrap();
    let config = GuestConfig {
        mac,
        address: address.parse().unwrap(),
        prefix: prefix.parse().unwrap(),
        gateway: text(result, "/ips/0/gateway").parse().unwrap(),
        ..GuestConfig::new(text(result, "/interfaces/1/name"))
    };
    let guest = Guest::new(world, config).unwrap();
    if cell.is_ipv6() {
        give_ipv6(&guest);
    }
    guest
}

/// A daemon with the cell's family.
fn serve(cell: Cell, world: &World, pins: &PinDir) -> Slipgate {
    let args = [&["--uplink", UPLINK], cell.give(world)].concat();
    Slipgate::serve(&world.host, pins, &args).unwrap()
}

fn vms(daemon: &Slipgate) -> Vec<String> {
    let listed = daemon.run(&["vm", "ls", "--json"]).unwrap().stdout;
    let listed: Vec<Value> = serde_json::from_slice(&listed).unwrap();
    let names = listed.iter().map(|vm| vm["name"].as_str().unwrap());
    names.map(str::to_owned).collect()
}

fn taps(world: &World) -> usize {
    let links = world.host.ip("-o link show type tun").unwrap();
    links.matches(": sg").count() - links.matches(": sgport").count()
}

fn a_plugins_tap_leads_its_guest_to_the_world_until_it_is_taken_away(cell: Cell) {
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    let runtime = Runtime::new(&world, &pins);
    let in_shared = json!({"netns": runtime.netns});
    assert_eq!(runtime.code("STATUS", "", in_shared.clone()), 51);
    assert_eq!(runtime.code("ADD", "web1", json!({})), 11);
    assert_eq!(runtime.code("DEL", "web1", json!({})), 11);
    assert_eq!(taps(&world), 0);

    let daemon = serve(cell, &world, &pins);
    let echo = TcpServer::start(&world.net, (cell.server(), 7000), TcpService::Echo).unwrap();
    runtime.call("STATUS", "", in_shared).unwrap();
    let versions = runtime.call("VERSION", "", json!({})).unwrap();
    let versions = versions["supportedVersions"].as_array().unwrap().clone();
    assert!(versions.contains(&"1.1.0".into()));

    let first = runtime.add("web1");
    // As firecracker-go-sdk's vmconf wants it.
    assert_eq!(text(&first, "/interfaces/0/sandbox"), "web1");
    let name = text(&first, "/interfaces/0/name").to_owned();
    assert_eq!(text(&first, "/interfaces/1/name"), name);
    assert_eq!(
        text(&first, "/interfaces/1/sandbox"),
        runtime.netns.display().to_string()
    );
    assert_eq!(first["ips"].as_array().unwrap().len(), 1);
    assert_eq!(first["ips"][0]["interface"], 0);
    assert_eq!(text(&first, "/dns/nameservers/0"), "10.0.2.3");
    let one = guest(cell, &world, &first);
    let mut stream = one.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    let mut goes_on = || {
        let session = one.run(|| EchoSession::new(&mut stream).round(1_000));
        session.unwrap();
    };
    goes_on();
    let before = json!({"prevResult": first});
    runtime.call("CHECK", "web1", before.clone()).unwrap();
    // What is there is not made again.
    assert_eq!(runtime.code("ADD", "web1", json!({})), 100);
    goes_on();

    let second = runtime.add("web2");
    assert_ne!(text(&second, "/interfaces/1/name"), name);
    let two = guest(cell, &world, &second);
    two.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    assert_eq!(vms(&daemon), ["web1.eth0", "web2.eth0"]);
    assert_eq!(taps(&world), 2);
    // A TAP that is not the one ADD made.
    assert_eq!(runtime.code("CHECK", "web2", before.clone()), 101);
    // A VM that others added, and another network's attachment, are not the network's to collect.
    daemon.run(&["vm", "add", "own", "--tap", "tap9"]).unwrap();
    let other = json!({"name": "others"});
    runtime.call("ADD", "web3", other.clone()).unwrap();
    drop(two);
    runtime.keep_only(&["web1"]);
    assert_eq!(vms(&daemon), ["own", "web1.eth0", "web3.eth0"]);
    assert_eq!(taps(&world), 2);
    goes_on();

    runtime.call("DEL", "web3", other).unwrap();
    drop(one);
    for _ in 0..2 {
        runtime.call("DEL", "web1", json!({})).unwrap();
        assert_eq!(vms(&daemon), ["own"]);
        assert_eq!(taps(&world), 0);
    }
    assert_eq!(runtime.code("CHECK", "web1", before), 101);
    // Its namespace may be gone before it.
    let gone = Runtime {
        netns: "/run/netns/is-not-there".into(),
        ns: world.host.clone(),
        config: runtime.config.clone(),
    };
    gone.call("DEL", "web1", json!({})).unwrap();
}

fn a_plugin_that_is_refused_leaves_nothing_and_katas_file_has_what_is_there(cell: Cell) {
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    let runtime = Runtime::new(&world, &pins);
    let daemon = serve(cell, &world, &pins);
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("dans");
    let file = folder.join("pod.json");
    for (wrong, code) in [
        (json!({"policy": "none-such"}), 102),
        (json!({"ip": "192.0.2.1"}), 102),
        (json!({"mac": "nonsense"}), 102),
        (json!({"mtu": 1}), 5),
        (json!({"polcy": "closed"}), 6),
        (json!({"kataDan": "/proc/nowhere"}), 5),
    ] {
        assert_eq!(runtime.code("ADD", "pod", wrong.clone()), code, "{wrong}");
        assert_eq!((vms(&daemon).len(), taps(&world)), (0, 0), "{wrong}");
    }

    let kata = json!({
        "kataDan": folder,
        "mtu": 1400,
        "mac": "52:54:00:00:00:07",
        "ip": "10.0.2.77",
        "quotas": {"max_flows": 10},
        "labels": {"tenant": "a"},
        "uplink": "tunnel0",
    });
    let result = runtime.call("ADD", "pod", kata.clone()).unwrap();
    // containerd looks for the name that it gave.
    assert_eq!(text(&result, "/interfaces/0/name"), "eth0");
    let sandbox: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(
        text(&sandbox, "/netns"),
        runtime.netns.display().to_string()
    );
    let device = &sandbox["devices"][0];
    assert_eq!(device["device"]["type"], "host-tap");
    assert_eq!(
        device["device"]["tap_name"],
        result["interfaces"][1]["name"]
    );
    assert_eq!(device["guest_mac"], "52:54:00:00:00:07");
    let interface = &device["network_info"]["interface"];
    assert_eq!(interface["ip_addresses"], json!(["10.0.2.77/24"]));
    assert_eq!(interface["mtu"], 1400);
    let listed = daemon.run(&["vm", "ls", "--json"]).unwrap().stdout;
    let listed: Value = serde_json::from_slice(&listed).unwrap();
    assert_eq!(listed[0]["mac"], "52:54:00:00:00:07");
    assert_eq!(listed[0]["quotas"]["max_flows"], 10);
    assert_eq!(listed[0]["labels"]["tenant"], "a");
    assert_eq!(listed[0]["uplink"], "tunnel0");
    assert_eq!(listed[0]["lacks_uplink"], true);
    runtime.call("DEL", "pod", kata.clone()).unwrap();
    assert!(!file.exists());
    assert_eq!((vms(&daemon).len(), taps(&world)), (0, 0));
    // What the runtime has forgotten is collected with its file; another's file stays.
    runtime.call("ADD", "pod", kata.clone()).unwrap();
    let other = folder.join("other.json");
    fs::write(&other, r#"{"netns": "/n", "devices": [{"name": "eth0"}]}"#).unwrap();
    let mut of_network = kata;
    of_network["cni.dev/valid-attachments"] = json!([]);
    of_network["netns"] = json!(runtime.netns);
    runtime.call("GC", "", of_network).unwrap();
    assert!(!file.exists() && other.exists());
    assert_eq!((vms(&daemon).len(), taps(&world)), (0, 0));
}

fn ports_and_a_policy_come_with_the_attachment(cell: Cell) {
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    let runtime = Runtime::new(&world, &pins);
    let _daemon = serve(cell, &world, &pins);
    let echo = TcpServer::start(&world.net, (cell.server(), 7000), TcpService::Echo).unwrap();
    let local = (cell.loopback(), 7000);
    let _service = TcpServer::start(&world.host, local, TcpService::Echo).unwrap();
    let more = json!({
        "policy": { "default": "deny" },
        "hostLoopback": ["8000:7000"],
        "runtimeConfig": {
            "portMappings": [
                { "hostPort": 8080, "containerPort": 80, "protocol": "tcp" },
                { "hostPort": 8081, "containerPort": 80, "hostIP": cell.host() },
            ],
        },
    });
    let result = runtime.call("ADD", "web1", more.clone()).unwrap();
    let one = guest(cell, &world, &result);
    let server = (cell.guest(), 80);
    let _server = TcpServer::start(&one.ns, server, TcpService::Echo).unwrap();
    // It shows its address, to which the port leads.
    assert!(pings(&one, cell.gateway(), WAIT));
    for port in [8080, 8081] {
        let from_world = world.net.run(|| tcp::connect(at(cell.host(), port), WAIT));
        EchoSession::new(&mut from_world.unwrap())
            .round(100)
            .unwrap();
    }
    one.run(|| tcp::expect_refused(echo.address())).unwrap();
    let to_host = one.run(|| tcp::connect(at(cell.gateway(), 8000), WAIT));
    EchoSession::new(&mut to_host.unwrap()).round(100).unwrap();
    // Another attachment can't have the port.
    assert_eq!(runtime.code("ADD", "web2", more.clone()), 102);
    assert_eq!(taps(&world), 1);
    drop(one);
    runtime.call("DEL", "web1", more.clone()).unwrap();
    runtime.call("ADD", "web2", more).unwrap();
}

fn an_attachment_takes_no_vm_that_is_there(cell: Cell) {
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    let runtime = Runtime::new(&world, &pins);
    let daemon = serve(cell, &world, &pins);
    let mine = ["vm", "add", "web1.eth0", "--tap", "tap9"];
    daemon.run(&mine).unwrap();
    assert_eq!(runtime.code("ADD", "web1", json!({})), 100);
    assert_eq!(taps(&world), 0);
    let listed = daemon.run(&["vm", "ls", "--json"]).unwrap().stdout;
    let listed: Value = serde_json::from_slice(&listed).unwrap();
    assert_eq!(listed[0]["tap"], "tap9");
}

/// Where `cargo xtask test` puts the clients that it builds of `tests/cni-clients`.
const CLIENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools/cni-clients");

fn cnis_own_client_and_firecrackers_parser_understand_the_plugin(cell: Cell) {
    let client = |name| Some(Path::new(CLIENTS).join(name)).filter(|path| path.is_file());
    let (Some(cnitool), Some(vmconf)) = (client("cnitool"), client("vmconf")) else {
        skipped!("`cargo xtask test` could not build tests/cni-clients, for which it needs Go");
        return;
    };
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    let runtime = Runtime::new(&world, &pins);
    let daemon = serve(cell, &world, &pins);
    let echo = TcpServer::start(&world.net, (cell.server(), 7000), TcpService::Echo).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    symlink(binary().unwrap(), scratch.path().join("slipgate")).unwrap();
    let plugin = json!({
        "type": "slipgate",
        "pinDir": pins.path(),
        "netns": runtime.netns,
        "capabilities": { "portMappings": true },
    });
    let list = json!({"cniVersion": "1.1.0", "name": "vms", "plugins": [plugin]});
    fs::write(scratch.path().join("vms.conflist"), list.to_string()).unwrap();
    let mapped = json!({
        "portMappings": [{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp" }],
    });
    let call = |verb: &str| {
        let mut command = Command::new(&cnitool);
        command
            .args([verb, "vms"])
            .arg(&runtime.netns)
            .env("CNI_PATH", scratch.path())
            .env("NETCONFPATH", scratch.path())
            .env("CAP_ARGS", mapped.to_string());
        runtime.ns.output(command)
    };
    call("status").unwrap();
    let added = call("add").unwrap().stdout;
    let result: Value = serde_json::from_slice(&added).unwrap();
    call("check").unwrap();

    let file = scratch.path().join("result.json");
    fs::write(&file, &added).unwrap();
    let mut command = Command::new(vmconf);
    command
        .arg(text(&result, "/interfaces/0/sandbox"))
        .arg(file);
    let read: Value = serde_json::from_slice(&runtime.ns.output(command).unwrap().stdout).unwrap();
    let tap = text(&result, "/interfaces/1/name");
    assert_eq!(
        read,
        json!({
            "tap": tap,
            "netns": runtime.netns,
            "mac": result["interfaces"][0]["mac"],
            "mtu": 1500,
            "boot": "10.0.2.15::10.0.2.2:255.255.255.0:::off:10.0.2.3::",
            "resolvers": ["10.0.2.3"],
        })
    );

    // The network is as it was read.
    let one = guest(cell, &world, &result);
    let mut stream = one.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    one.run(|| EchoSession::new(&mut stream).round(1_000))
        .unwrap();
    let _server = TcpServer::start(&one.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let from_world = world.net.run(|| tcp::connect(at(cell.host(), 8080), WAIT));
    EchoSession::new(&mut from_world.unwrap())
        .round(100)
        .unwrap();
    drop(one);
    for _ in 0..2 {
        call("del").unwrap();
        assert_eq!((vms(&daemon).len(), taps(&world)), (0, 0));
    }
    call("check").unwrap_err();
}
