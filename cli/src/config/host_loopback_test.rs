use std::io::Write as _;

use slipgate_policy::LoopbackPorts;

use super::tests::config;

/// The texts of what each policy of a command line lists.
fn listed(flags: &str, file: &str) -> Result<Vec<Vec<String>>, String> {
    let mut written = tempfile::NamedTempFile::new().unwrap();
    written.write_all(file.as_bytes()).unwrap();
    let config = config(&format!("--policy {} {flags}", written.path().display()))?;
    let loaded = config.load_policies().map_err(|e| e.to_string())?;
    let lists = loaded.policies.iter().map(|policy| {
        let list = policy.settings.host_loopback.iter();
        list.map(LoopbackPorts::to_string).collect()
    });
    Ok(lists.collect())
}

#[test]
fn nothing_is_listed_unless_somebody_does() {
    let config = config("--tap t0").unwrap();
    let loaded = config.load_policies().unwrap();
    assert!(loaded.policies[0].settings.host_loopback.is_empty());
}

#[test]
fn flags_are_in_each_policy_and_a_files_list_in_its_own() {
    let file = "default = \"deny\"\n[host_loopback]\naddress = \"10.0.2.100\"\nports = [80, \"10.0.2.101:81/udp\"]\n\
                [policy.a]\ndefault = \"deny\"\n[policy.a.host_loopback]\nports = [\"9000-9001\"]\n\
                [policy.b]\ndefault = \"deny\"\n";
    let flags = "--vm tap=t0,policy=a --vm tap=t1,policy=b --host-loopback 8080:80/tcp";
    assert_eq!(
        listed(flags, file).unwrap(),
        [
            vec![
                "--host-loopback 8080:80/tcp",
                "host_loopback 10.0.2.100:80",
                "host_loopback 10.0.2.101:81/udp",
            ],
            vec!["--host-loopback 8080:80/tcp", "host_loopback 9000-9001"],
            vec!["--host-loopback 8080:80/tcp"],
        ]
    );
}

#[test]
fn what_can_not_be_is_said() {
    for (flags, file, said) in [
        (
            "--host-loopback x",
            "",
            "--host-loopback x: \"x\" is no port",
        ),
        (
            "--host-loopback 80 --host-loopback 70-90:170-190/udp",
            "",
            "port 80 leads to port 80 of the host already",
        ),
        (
            "--host-loopback 8080",
            "default = \"deny\"\n[host_loopback]\nports = [\"8080/udp\"]",
            "--host-loopback 8080/udp: the policy file's entry clashes with a flag: port 8080",
        ),
        (
            "--host-loopback 192.0.2.1:80",
            "",
            "outside the gateway's network 10.0.2.0/24",
        ),
        (
            "--host-loopback 10.0.2.15:80",
            "",
            "the address of the guest t0",
        ),
        ("--host-loopback 10.0.2.255:80", "", "the last address of"),
        (
            "",
            "[host_loopback]\naddress = \"127.0.0.1\"",
            "2:11: 127.0.0.1: not a unicast address",
        ),
        (
            "",
            "[policy.a]\ndefault = \"deny\"\n[policy.a.host_loopback]\n\
             ports = [\"192.0.2.1:80\"]\n[vms]\nt0 = \"a\"",
            "4:10: 192.0.2.1: outside",
        ),
    ] {
        let error = listed(&format!("--tap t0 {flags}"), file).unwrap_err();
        assert!(error.contains(said), "{flags} {file}\n{error}");
    }
}
