from dalsegno.cli.main import main

main()
