"""Writes the certificates that tests use, beside itself: `python3 make.py`, where Python has `cryptography`.

They are kept with the tests so that these need neither it nor openssl, and are good for a hundred years.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = Path(__file__).parent
BEGIN, END = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)


def write_key(name: str, key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> None:
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
    (HERE / f"{name}.key").write_bytes(text)


def make(
    name: str,
    *,
    san: str = "",
    others: Sequence[x509.GeneralName] = (),
    issuer: "tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None" = None,
    end: datetime.datetime = END,
) -> "tuple[x509.Certificate, ec.EllipticCurvePrivateKey]":
    """A certificate and its key, into NAME.pem and NAME.key; without an issuer a CA, whose key is not kept."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"moonpool test {name}")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(san), *others]), critical=False)
    certificate = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    (HERE / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    if issuer:
        write_key(name, key)
    return certificate, key


if __name__ == "__main__":
    authority, strange = make("ca"), make("other_ca")
    _, node_key = make("node", san="moonpool", issuer=authority)
    write_key("locked", node_key, b"secret")
    make("successor", san="moonpool", issuer=authority)
    make("misnamed", san="elsewhere", issuer=authority)
    mail = (x509.RFC822Name("moonpool"), x509.UniformResourceIdentifier("moonpool"))
    make("of_mail", san="elsewhere", others=mail, issuer=authority)
    make("expired", san="moonpool", issuer=authority, end=datetime.datetime(2021, 1, 1))
    make("stranger", san="moonpool", issuer=strange)
