//! libvirt's own session daemon, of a user without any privilege, with slipgate in the place of passt.
//!
//! Debian 12 switched passt off in its libvirt; Debian 13's, in a root directory of its own
//! ([`crate::other_root`]), has it. `as_passt` has libvirt's command lines, everywhere.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Child, Output, Stdio},
};

use slipgate_testbed::{
    builtin_guest::image,
    clients::{tcp, tcp::EchoSession},
    left_out, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    signal,
    world::{HOST, SERVER, SERVER_2},
};

use crate::{WAIT, at, eventually, other_root, unprivileged::Place};

const CLOSE: u16 = 7001;
const STREAMS: u16 = 7002;
const STREAM_BYTES: u64 = 1_000_000;

/// A running session daemon. It and its domain end on drop.
struct Libvirt {
    place: Place,
    daemon: Option<Child>,
}

impl Libvirt {
    /// Starts the daemon, if there is one.
    fn start(place: Place) -> Result<Self, String> {
        let root = other_root::root();
        for program in ["usr/sbin/libvirtd", "usr/bin/virsh"] {
            if !root.join(program).exists() {
                let root = root.display();
                return Err(format!("there is no {program} in {root}"));
            }
        }
        let config = place.file("run/.config/libvirt");
        fs::create_dir_all(&config).unwrap();
        // No process of its own for the logs.
        fs::write(config.join("qemu.conf"), "stdio_handler = \"file\"\n").unwrap();
        let owner = fs::metadata(place.file("run")).unwrap().uid();
        for made in [place.file("run/.config"), config] {
            chown(made, Some(owner), Some(owner)).unwrap();
        }
        let mut libvirt = Self {
            place,
            daemon: None,
        };
        // It ends by itself when nobody asks any more.
        let mut daemon = other_root::command(&libvirt.place, &["libvirtd", "--timeout", "60"]);
        daemon.stdin(Stdio::null()).stdout(Stdio::null());
        let log = fs::File::create(libvirt.place.file("libvirtd.log")).unwrap();
        daemon.stderr(log);
        libvirt.daemon = Some(libvirt.place.world.host.spawn(daemon).unwrap());
        // virsh would start another one if this did not listen yet.
        let listens = libvirt.place.file("run/libvirt/libvirt-sock");
        eventually("libvirt listens", || listens.exists().then_some(()));
        eventually("libvirt answers", || {
            libvirt.virsh(&["version"]).status.success().then_some(())
        });
        Ok(libvirt)
    }

    fn virsh(&self, words: &[&str]) -> Output {
        let words = [&["virsh", "-c", "qemu:///session"], words].concat();
        let mut command = other_root::command(&self.place, &words);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = self.place.world.host.spawn(command).unwrap();
        child.wait_with_output().unwrap()
    }

    /// Where libvirt has sockets and process ids of passt.
    fn state(&self) -> PathBuf {
        self.place.file("run/libvirt/qemu/run/passt")
    }

    /// The process id in the file that libvirt named.
    fn passt(&self) -> Option<u32> {
        let files = fs::read_dir(self.state()).ok()?;
        let file = files
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|it| it == "pid"))?;
        fs::read_to_string(file).ok()?.trim().parse().ok()
    }

    fn log(&self) -> String {
        let log = self.place.file("run/.cache/libvirt/qemu/log/web.log");
        fs::read_to_string(log).unwrap_or_default()
    }

    fn echoes(&self, port: u16) -> Option<()> {
        let host = &self.place.world.host;
        let mut stream = host.run(|| tcp::connect(at(HOST, port), WAIT)).ok()?;
        EchoSession::new(&mut stream).round(1_000).ok().map(drop)
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        self.virsh(&["destroy", "web"]);
        if let Some(daemon) = &mut self.daemon {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A domain whose card is of this type of interface.
fn domain(place: &Place, interface: &str, kernel: &Path, line: &str) -> String {
    let [log, console] = ["run/passt.log", "run/console"].map(|name| place.file(name));
    let (kernel, log, console) = (kernel.display(), log.display(), console.display());
    format!(
        "<domain type='qemu'><name>web</name><memory unit='MiB'>128</memory><vcpu>1</vcpu>
        <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
        <os><type arch='x86_64' machine='q35'>hvm</type>
        <kernel>{kernel}</kernel><cmdline>{line}</cmdline></os><features><acpi/></features>
        <devices><interface type='{interface}'>
        <mac address='52:54:00:12:34:56'/><model type='virtio'/>
        <address type='pci' domain='0' bus='0' slot='0x10' function='0'/>
        <backend type='passt' logFile='{log}'/>
        <ip address='10.0.2.15' family='ipv4' prefix='24'/>
        <portForward proto='tcp' address='{HOST}'><range start='8080' end='8083' to='80'/>
        <range start='8081' end='8082' exclude='yes'/></portForward>
        </interface>
        <serial type='file'><source path='{console}'/></serial><memballoon model='none'/>
        </devices></domain>"
    )
}

/// A domain has a lease, names, streams and a forward; it goes on when slipgate is killed, where libvirt
/// starts it again; and its end is slipgate's.
fn works_under_libvirt(interface: &str) {
    require_root_and_tun!();
    let place = Place::new();
    let net = &place.world.net;
    let zone = Zone::from([("api.example.test".into(), Answer::a(SERVER_2, 300))]);
    let _resolver = DnsServer::start(net, (SERVER, 53), zone).unwrap();
    let close = TcpServer::start(net, (SERVER_2, CLOSE), TcpService::Close).unwrap();
    let _streams = TcpServer::start(net, (SERVER_2, STREAMS), TcpService::Streams).unwrap();
    let kernel = place.file("guest");
    place.user.install(&image().unwrap(), "guest").unwrap();
    let flows = place.file("run/flows.jsonl");
    // The script of docs/attach-socket.md.
    let script = format!(
        "#!/bin/sh\nSLIPGATE_PASST_FLAGS=\"--dns {SERVER} --default deny --allow *.example.test:7001-7002 \
         --flow-log {}\"\nexport SLIPGATE_PASST_FLAGS\nexec {} passt \"$@\"\n",
        flows.display(),
        place.file("slipgate").display()
    );
    fs::write(place.file("passt"), script).unwrap();
    fs::set_permissions(place.file("passt"), fs::Permissions::from_mode(0o755)).unwrap();
    let name = "api.example.test";
    let line = format!(
        "crr {name}:{CLOSE} 20 x2 close; stream {name}:{STREAMS} {STREAM_BYTES} down; serve 80 83 300s"
    );
    let xml = domain(&place, interface, &kernel, &line);
    let definition = place.file("domain.xml");
    fs::write(&definition, xml).unwrap();
    let libvirt = match Libvirt::start(place) {
        Ok(libvirt) => libvirt,
        Err(why) => return left_out!("{why}"),
    };
    let place = &libvirt.place;
    let created = libvirt.virsh(&["create", definition.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&created.stderr).into_owned();
    if said.contains("XML error") || said.contains("unsupported configuration") {
        return left_out!(
            "this libvirt takes no passt at an interface of type {interface}: {said}"
        );
    }
    assert!(created.status.success(), "{said}");

    let console = place.file("run/console");
    let text = || fs::read_to_string(&console).unwrap_or_default();
    eventually("the guest serves", || {
        text().contains("\"serving\"").then_some(())
    });
    let text = text();
    assert_eq!(text.matches("\"failed\":0,").count(), 2, "{text}");
    assert!(text.contains("\"address\":\"10.0.2.15/24\""), "{text}");
    assert_eq!(close.accepted(), 20, "{text}");
    for port in [8080, 8083] {
        eventually("a forward leads to the guest", || libvirt.echoes(port));
    }
    assert!(libvirt.echoes(8081).is_none(), "it is left out");
    let listed = place.output(&["flows", "--json"]);
    assert!(listed.contains("-web-net0"), "{listed}");

    // Killed: libvirt starts it again, and QEMU connects again after 5 s.
    let reconnects = libvirt.log().contains("\"reconnect");
    if interface == "user" && !reconnects {
        left_out!("this libvirt does not have QEMU reconnect (it does from 11 on)");
    }
    if interface == "user" && reconnects {
        let killed = libvirt.passt().unwrap();
        signal(killed, libc::SIGKILL);
        eventually("libvirt starts it again", || {
            libvirt.passt().filter(|pid| *pid != killed)
        });
        eventually("the guest goes on", || libvirt.echoes(8080));
    }

    assert!(libvirt.virsh(&["destroy", "web"]).status.success());
    eventually("nothing is left", || {
        let left = fs::read_dir(libvirt.state()).unwrap().count();
        (left == 0 && place.user.has_nothing_left()).then_some(())
    });
    let records = fs::read_to_string(flows).unwrap();
    // Those of a killed slipgate died with it.
    assert!(records.contains("\"flow_end\""), "{records}");
}

#[test]
fn a_domain_of_libvirt_has_its_network_by_slipgate() {
    works_under_libvirt("user");
}

#[test]
fn a_domain_of_libvirt_gives_its_rings_to_slipgate() {
    works_under_libvirt("vhostuser");
}
