//! A client of both families (RFC 8305) loses no time where the host has no IPv6: it is told no address
//! that it could wait for. The client is curl with the C library's resolver, and would wait for an IPv6
//! address for longer than the test.

use std::{
    collections::HashMap,
    fs,
    net::IpAddr,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    dns_wire::Record,
    servers::{Answer, DnsServer, HttpServer, Zone},
    world::SERVER,
    world_ipv6::SERVER6,
};

use crate::{Cell, Stand, eventually, matrix::matrix, stand::give_ipv6};

matrix! {
    a_client_of_both_families_loses_no_time_without_ipv6: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const NAME: &str = "both.example.test";
const PORT: u16 = 8080;
/// Without lines for `fc00::/7` and others: an address of IPv6 is tried first, though the guest's own is
/// private (RFC 6724 section 2.1, gai.conf(5)).
const IPV6_FIRST: &str = "label ::/0 1\nlabel ::ffff:0:0/96 4\n\
                          precedence ::/0 40\nprecedence ::ffff:0:0/96 10\n";
/// How long the client waits for the other family's connection before it begins one of IPv4.
const CLIENTS_PATIENCE_MS: &str = "20000";
/// A resolver that does not answer costs 5 s, a connection that fails in silence 20 s.
const NO_TIME: Duration = Duration::from_secs(4);

fn a_client_of_both_families_loses_no_time_without_ipv6(cell: Cell) {
    match cell.is_ipv6() {
        // IPv6 was there, and its route goes.
        true => {
            let stand = Stand::of(cell, &["--dns", "203.0.113.10"]);
            let client = Client::beside(&stand);
            assert_eq!(client.page(&stand).0, "by IPv6");
            stand.world.host.ip("-6 route del default").unwrap();
            eventually("IPv4", || {
                (client.page(&stand).0 == "by IPv4").then_some(())
            });
            client.loses_no_time(&stand);
        }
        false => {
            for ipv6 in ["off", "auto"] {
                let args = ["--dns", "203.0.113.10", "--ipv6", ipv6];
                let stand = Stand::of(cell, &args);
                let client = Client::beside(&stand);
                // An image may have addresses of its own.
                give_ipv6(&stand.guest);
                client.loses_no_time(&stand);
            }
        }
    }
}

/// A client's configuration, and what it asks.
struct Client {
    /// Files in place of those of the same name in `/etc`.
    etc: tempfile::TempDir,
    _resolver: DnsServer,
    _pages: Vec<HttpServer>,
}

impl Client {
    fn beside(stand: &Stand) -> Client {
        let records = vec![
            Record::of_address(SERVER, 300),
            Record::of_address(SERVER6, 300),
        ];
        let zone = Zone::from([(NAME.to_owned(), Answer::records(records))]);
        let net = &stand.world.net;
        let resolver = DnsServer::start(net, (SERVER, 53), zone).unwrap();
        let page = |ip: IpAddr, says: &str| {
            let pages = HashMap::from([("/".to_owned(), says.as_bytes().to_vec())]);
            HttpServer::start(net, (ip, PORT), pages).unwrap()
        };
        let mut pages = vec![page(SERVER.into(), "by IPv4")];
        if stand.cell.is_ipv6() {
            pages.push(page(SERVER6.into(), "by IPv6"));
        }
        let etc = tempfile::tempdir().unwrap();
        let resolvers = format!("nameserver {}\n", stand.cell.dns());
        fs::write(etc.path().join("resolv.conf"), resolvers).unwrap();
        fs::write(etc.path().join("gai.conf"), IPV6_FIRST).unwrap();
        Client {
            etc,
            _resolver: resolver,
            _pages: pages,
        }
    }

    /// What the client gets, and the time that it took.
    fn page(&self, stand: &Stand) -> (String, Duration) {
        let etc = self.etc.path().display();
        let curl = format!(
            "mount --bind {etc}/resolv.conf /etc/resolv.conf && \
             mount --bind {etc}/gai.conf /etc/gai.conf && exec curl -s --max-time 25 \
             --happy-eyeballs-timeout-ms {CLIENTS_PATIENCE_MS} http://{NAME}:{PORT}/",
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &curl]);
        command.stdout(Stdio::piped());
        let begun = Instant::now();
        let output = stand.guest.spawn(command).unwrap().wait_with_output();
        let output = output.unwrap();
        let took = begun.elapsed();
        assert!(output.status.success(), "{}, {took:?}", output.status);
        (String::from_utf8(output.stdout).unwrap(), took)
    }

    fn loses_no_time(&self, stand: &Stand) {
        let (page, took) = self.page(stand);
        assert_eq!(page, "by IPv4");
        assert!(took < NO_TIME, "{took:?}");
    }
}
