//! A guest that another project's client configures, as distributions have it: dhcpcd, in place of the
//! kernel, by router advertisements and stateless DHCPv6.
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use slipgate_testbed::{GUEST_DEVICE, WorldConfig, require_root_and_tun, skipped};

use super::{NAME, RESOLVER, names, scene::*};
use crate::{Stand, WAIT, eventually};

/// Begins a command in files of its own: what it writes into `/run`, where its state is, and the
/// resolvers of the C library. What the machine's own services have in `/run` is out of reach.
/// Where `/etc/resolv.conf` leads into `/run`, the file is made there; elsewhere it must be there.
const IN_OWN_FILES: &str = r#"set -e
mount --bind "$1/run" /run
resolv=$(readlink -m /etc/resolv.conf)
case $resolv in /run/*) mkdir -p "${resolv%/*}"; [ -e "$resolv" ] || : > "$resolv" ;; esac
mount --bind "$1/resolv.conf" "$resolv"
if [ -d /var/lib/dhcpcd ]; then mount --bind "$1/state" /var/lib/dhcpcd; fi
shift
exec "$@""#;

/// A guest's system, whose client has its own files. Fields go in order.
struct System {
    client: Child,
    stand: Stand,
    files: tempfile::TempDir,
}

impl System {
    /// Starts the client in the guest of a stand, whose kernel does nothing for itself.
    fn start(stand: Stand, program: &Path) -> System {
        let ns = &stand.guest.ns;
        for (key, value) in [("accept_ra", "0"), ("addr_gen_mode", "1")] {
            let key = format!("net.ipv6.conf.{GUEST_DEVICE}.{key}");
            ns.sysctl(&key, value).unwrap();
        }
        enable_guest(&stand);
        let files = tempfile::tempdir().unwrap();
        for folder in ["run", "state"] {
            fs::create_dir(files.path().join(folder)).unwrap();
        }
        fs::write(files.path().join("resolv.conf"), "").unwrap();
        let log = fs::File::create(files.path().join("log")).unwrap();
        // As a distribution configures it, but for what is this machine's: its name, udev, and another
        // program that keeps the resolvers.
        let mut command = in_own_files(files.path());
        command
            .arg(program)
            .args(["-6", "--nobackground", "--nodev", "--nohook", "hostname"])
            .args(["--env", "resolvconf=/nonexistent", GUEST_DEVICE])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let client = stand.guest.spawn(command).unwrap();
        System {
            client,
            stand,
            files,
        }
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.files.path().join(file)).unwrap_or_default()
    }

    /// What a program of the guest's system says.
    fn output(&self, words: &[&str]) -> String {
        let mut command = in_own_files(self.files.path());
        command.args(words);
        let said = self.stand.guest.ns.output(command).unwrap().stdout;
        String::from_utf8(said).unwrap()
    }
}

impl Drop for System {
    fn drop(&mut self) {
        // Its helpers end with the guest's namespace.
        let _ = self.client.kill();
        let _ = self.client.wait();
        if std::thread::panicking() {
            eprintln!("the client's log:\n{}", self.read("log"));
        }
    }
}

fn in_own_files(files: &Path) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", IN_OWN_FILES, "sh"])
        .arg(files);
    command
}

fn dhcpcd() -> Option<PathBuf> {
    let folders = ["/usr/sbin", "/sbin", "/usr/bin", "/usr/local/sbin"];
    let paths = folders
        .iter()
        .map(|folder| Path::new(folder).join("dhcpcd"));
    paths.into_iter().find(|path| path.is_file())
}

#[test]
fn ipv6_stock_client_uses_the_advertised_resolver_and_stateless_dhcpv6() {
    require_root_and_tun!();
    let Some(program) = dhcpcd() else {
        skipped!("it needs dhcpcd, which `cargo xtask test` installs where there is apt");
        return;
    };
    let stand = unconfigured6(
        WorldConfig::default(),
        &[&RESOLVER[..], &["--mtu", "1400"]].concat(),
    );
    give_world(&stand.world);
    let names = names(&stand);
    let system = System::start(stand, &program);
    let stand = &system.stand;

    // It names what it has each resolver from: one is advertised, one is told by DHCPv6.
    let from = [
        format!("{GUEST_DEVICE}.ra"),
        format!("{GUEST_DEVICE}.dhcp6"),
    ];
    let resolvers = eventually("the resolver from both", || {
        let told = system.read("resolv.conf");
        from.iter().all(|from| told.contains(from)).then_some(told)
    });
    let resolvers = resolvers
        .lines()
        .filter_map(|line| line.strip_prefix("nameserver "));
    assert_eq!(resolvers.collect::<Vec<_>>(), [GATEWAY6]);
    let total = stand.total();
    assert!(total["dhcp_messages"].as_u64() >= Some(1), "{total}");

    // The address and the route are its own work too, and what the advertisement says of the MTU.
    let ns = &stand.guest.ns;
    until("an address that it is sure of", || {
        let sure = format!("-6 -o addr show dev {GUEST_DEVICE} scope global -tentative");
        ns.ip(&sure).unwrap().contains(PREFIX.trim_end_matches(':'))
    });
    let route = eventually("a default route", || {
        let shown = ns.ip("-6 route show default").unwrap();
        (!shown.is_empty()).then_some(shown)
    });
    assert!(route.contains("via fe80::53:4cff:fe47:1"), "{route}");
    assert!(route.contains("mtu 1400"), "{route}");

    // Programs resolve by it.
    let asked = names.udp_queries(NAME);
    let found = system.output(&["getent", "ahostsv6", NAME]);
    assert!(found.starts_with(SERVER6), "{found}");
    assert!(names.udp_queries(NAME) > asked);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(stand, server.address()).unwrap();
    let sent = vec![7; 100_000];
    stream.set_read_timeout(Some(WAIT)).unwrap();
    assert!(round(&mut stream, &sent).unwrap() == sent);
}
