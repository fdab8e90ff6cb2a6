//! A network namespace with nftables for each VM, set up by commands.
use anyhow::Result;
use slipgate_testbed::NetNs;

use super::Fleet;
use crate::workload::Sample;

pub(super) const NAME: &str = "netns+nftables";

/// The VMs' namespaces, in order.
#[derive(Default)]
pub(super) struct Script {
    namespaces: Vec<(String, NetNs)>,
}

impl Fleet for Script {
    fn add(&mut self, host: &NetNs, tap: &str) -> Result<()> {
        let number = self.namespaces.len();
        let own = NetNs::new(tap)?;
        let (third, fourth) = (number / 64, number % 64 * 4);
        let (out, inside) = (format!("v{number}"), "eth0");
        let peer = own.path();
        let peer = peer.display();
        host.batch(
            "ip",
            &format!(
                "link add {out} type veth peer name w{number}\n\
                 link set w{number} netns {peer}\n\
                 link set {tap} netns {peer}\n\
                 address add 172.31.{third}.{}/30 dev {out}\n\
                 link set {out} up\n",
                fourth + 1
            ),
        )?;
        own.batch(
            "ip",
            &format!(
                "link set w{number} name {inside}\n\
                 address add 172.31.{third}.{}/30 dev {inside}\n\
                 link set {inside} up\n\
                 link set {tap} up\n\
                 route add default via 172.31.{third}.{}\n",
                fourth + 2,
                fourth + 1
            ),
        )?;
        // What tc-redirect-tap does: each of the two sends what comes to the other.
        let step = |from: &str, to: &str| {
            format!(
                "qdisc add dev {from} ingress\n\
                 filter add dev {from} parent ffff: protocol all u32 match u32 0 0 action mirred \
                 egress redirect dev {to}\n"
            )
        };
        own.batch("tc", &(step(inside, tap) + &step(tap, inside)))?;
        own.nft(
            "table ip nat { chain post { type nat hook postrouting priority 100; masquerade; }; }",
        )?;
        self.namespaces.push((tap.to_owned(), own));
        Ok(())
    }

    fn remove(&mut self, host: &NetNs, tap: &str) -> Result<()> {
        let of_tap = |(name, _): &(String, NetNs)| name == tap;
        if let Some(at) = self.namespaces.iter().position(of_tap) {
            let number: String = tap.chars().filter(char::is_ascii_digit).collect();
            host.batch("ip", &format!("link del v{number}\n"))?;
            // The namespace goes with its last user, and the TAP with it.
            drop(self.namespaces.swap_remove(at));
        }
        Ok(())
    }

    fn cost(&self, _: &NetNs) -> Result<Sample> {
        // No process of its own.
        Ok(Sample::default())
    }
}
