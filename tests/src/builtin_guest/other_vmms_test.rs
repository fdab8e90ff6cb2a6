use super::*;
use crate::{NetNs, require_root_and_tun};

const LINE: &str = "address 10.0.2.15/24 10.0.2.2; crr 203.0.113.10:7001 5";

fn args(command: &Command) -> Vec<&str> {
    command
        .get_args()
        .map(|arg| arg.to_str().unwrap())
        .collect()
}

fn boot(namespace: &NetNs) -> Boot<'_> {
    Boot {
        cpus: 1,
        ..Boot::new(namespace, LINE)
    }
}

#[test]
fn firecracker_gets_a_machine_with_pci_and_one_card() {
    require_root_and_tun!();
    let namespace = NetNs::new("vmms").unwrap();
    let boot = &boot(&namespace);
    let command = firecracker("/opt/fc".as_ref(), "/tmp/m.json".as_ref());
    assert_eq!(command.get_program(), "/opt/fc");
    let expected = ["--no-api", "--enable-pci", "--config-file", "/tmp/m.json"];
    assert_eq!(args(&command), expected);
    let machine = firecracker_machine(boot, "/guest".as_ref(), "tap0");
    assert_eq!(machine["boot-source"]["kernel_image_path"], "/guest");
    assert_eq!(machine["boot-source"]["boot_args"], LINE);
    assert_eq!(machine["machine-config"]["vcpu_count"], 1);
    assert_eq!(machine["machine-config"]["mem_size_mib"], 128);
    let cards = machine["network-interfaces"].as_array().unwrap();
    assert_eq!(cards.len(), 1);
    assert_eq!(cards[0]["host_dev_name"], "tap0");
    assert_eq!(cards[0]["guest_mac"], MAC);
}

#[test]
fn cloud_hypervisor_gets_a_mac_and_the_namespaces_sys() {
    require_root_and_tun!();
    let namespace = NetNs::new("vmms").unwrap();
    let boot = &boot(&namespace);
    let command = cloud_hypervisor("/opt/ch".as_ref(), boot, "/guest".as_ref(), "tap0");
    let args = args(&command);
    let at = args.iter().position(|arg| *arg == "/opt/ch").unwrap();
    assert_eq!(args[..at], ["--mount", "sh", "-c", WITH_SYS, "sh"]);
    let value = |flag| {
        let flag = args.iter().position(|arg| *arg == flag).unwrap();
        args[flag + 1]
    };
    assert_eq!(value("--kernel"), "/guest");
    assert_eq!(value("--cmdline"), LINE);
    assert_eq!(value("--cpus"), "boot=1");
    assert_eq!(value("--memory"), "size=128M");
    assert_eq!(value("--net"), format!("tap=tap0,mac={MAC}"));
    assert_eq!((value("--serial"), value("--console")), ("tty", "off"));
    // What comes before the VMM runs it, in the place of the shell.
    let mut harmless = Command::new(command.get_program());
    harmless
        .args(&args[..at])
        .args(["cat", "/sys/class/net/lo/ifindex"]);
    let output = boot.namespace.output(harmless).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "1");
}

#[test]
fn a_vmm_that_is_not_named_is_said_with_its_variable() {
    for vmm in [OtherVmm::Firecracker, OtherVmm::CloudHypervisor] {
        if env::var_os(vmm.variable()).is_none() {
            let why = vmm.binary().unwrap_err().to_string();
            assert!(why.contains(vmm.variable()), "{why}");
        }
    }
}
