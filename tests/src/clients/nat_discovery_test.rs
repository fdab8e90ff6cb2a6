use super::*;

const SAID: &str = "
-= Mapping Behavior Discovery =-
========================================
NAT with Endpoint Independent Mapping!
========================================
-= Filtering Behavior Discovery =-
STUN receive timeout..
========================================
NAT with Address and Port Dependent Filtering!
========================================
";

#[test]
fn the_verdicts_are_read() {
    let mut expected = Behaviour {
        mapping: Dependence::EndpointIndependent,
        filtering: Dependence::AddressAndPortDependent,
        hairpinning: false,
    };
    assert_eq!(parse(SAID).unwrap(), expected);
    let said = SAID.replace("Address and Port Dependent F", "Address Dependent F")
        + "Received a request (maybe a successful hairpinning)\n";
    expected.filtering = Dependence::AddressDependent;
    expected.hairpinning = true;
    assert_eq!(parse(&said).unwrap(), expected);
}

#[test]
fn an_output_without_a_verdict_is_an_error() {
    let said = SAID.replace("Filtering!", "");
    assert!(parse(&said).is_err());
    assert!(parse("STUN receive timeout..").is_err());
}
